"""Tests of schedules, and of runs that are as long as they need."""

import json

import pytest

from conformance.errors import UsageError
from conformance.scenarios.averager import DTYPES, PLAIN
from conformance.scenarios.averager_training import (
    ALL,
    CHANGING,
    CHANGING_LATE,
    LATE,
    LONG,
    MOVED,
    NEAR_LIMIT,
    ONE_MODEL,
    ROLLED_BACK,
    SPECIAL,
    TWO,
    option,
    rolled_back,
    turn,
)
from conformance.scenarios.averaging_schedule import MAX_STEPS, QUIET, Schedule
from conformance.scenarios.draws import drawn
from conformance.scenarios.model import Scenario, scenario_from_json
from conformance.scenarios.moved_parameters import DTYPE, MEMORY, REPLACED, moves, specs_at, way
from conformance.subjects.claims import parse_claims
from conformance.subjects.kinds._averager_schedule import adapt, schedule_of


def schedule(text: str) -> Schedule:
    found = schedule_of(parse_claims(text, "averager").options)
    assert found is not None
    return found


def adapted(scenario: Scenario, text: str, seed: int = 0) -> Scenario:
    return adapt(drawn(scenario, seed), parse_claims(text, "averager").options)


def test_steps_with_averages() -> None:
    assert schedule("periodic(period=4, warmup_steps=10)").looked_at == [10, 14]
    hierarchical = schedule("hierarchical(period_group_size_dict={3: 2, 7: 4}, warmup_steps=5)")
    assert hierarchical.looked_at == [6, 7, 9, 14]
    assert [step for step in range(13) if hierarchical.is_due(step)] == [6, 7, 9, 12]
    assert schedule("like(OuterStepModelAverager, period=4)").looked_at == [3, 7]
    assert schedule("like(EMAModelAverager, decay=0.5)").looked_at == [0, 1]


def test_a_short_schedule_keeps_the_run() -> None:
    assert adapted(PLAIN, "periodic(period=4, warmup_steps=10)").steps == PLAIN.steps


@pytest.mark.parametrize("scenario", [PLAIN, *ALL], ids=lambda scenario: scenario.name)
def test_a_long_schedule_has_two_averages_in_ordinary_steps(scenario: Scenario) -> None:
    text = "periodic(period=200, warmup_steps=700)"
    found = adapted(scenario, text)
    due = [
        step
        for step in range(len(found.steps))
        if schedule(text).is_due(turn(found, step)[1]) and found.steps[step] != QUIET
    ]
    assert len(due) >= 2
    assert len(found.steps) < MAX_STEPS
    assert found.steps.count(QUIET) > 600


def test_averages_of_dtypes_are_crafted_and_random() -> None:
    steps = adapted(DTYPES, "periodic(period=100)").steps
    assert (steps[0], steps[100]) == ("crafted", "normal")


def test_a_schedule_that_is_too_long_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"second average is due at step 9000, .* 5000 steps"):
        parse_claims("periodic(period=9000)", "averager")


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_a_seed_gives_the_same_scenario_again(scenario: Scenario) -> None:
    text = "periodic(period=4, warmup_steps=10)"
    found = adapted(scenario, text, 5)
    assert found == adapted(scenario, text, 5)
    assert scenario_from_json(json.loads(json.dumps(found.to_json()))) == found


def test_two_averagers_both_average_twice_in_any_order() -> None:
    for seed in range(10):
        found = adapted(TWO, "periodic(period=3, warmup_steps=1)", seed)
        counts = {model: [] for model in (0, 1)}  # type: dict[int, list[int]]
        for step in range(len(found.steps)):
            model, count = turn(found, step)
            counts[model].append(count)
        assert all(of_model == list(range(len(of_model))) for of_model in counts.values())
        assert min(map(len, counts.values())) > 4


@pytest.mark.parametrize(("change", "before"), [("change", 20), ("addition", 70)])
def test_the_model_changes_between_two_averages(change: str, before: int) -> None:
    text = "periodic(period=50, warmup_steps=20)"
    changes = {int(option(adapted(CHANGING, text, seed), change)) for seed in range(20)}
    assert min(changes) > before
    assert max(changes) <= before + 50
    assert len(changes) > 10


def test_the_model_changes_late() -> None:
    text = "periodic(period=4, warmup_steps=3)"
    changes = {int(option(adapted(CHANGING_LATE, text, seed), "change")) for seed in range(20)}
    assert min(changes) > 3 + 4 * LATE[0]
    assert max(changes) <= 3 + 4 * (LATE[1] + 1)
    assert len(changes) > 10
    long = adapted(CHANGING_LATE, "periodic(period=1000)", 0)
    assert len(long.steps) <= MAX_STEPS + 4


def test_a_hierarchical_averager_goes_back_to_an_average_of_all_ranks() -> None:
    text = "hierarchical(period_group_size_dict={2: 2, 6: 4}, warmup_steps=3)"
    for seed in range(10):
        found = adapted(ROLLED_BACK, text, seed)
        assert int(option(found, "rolls_back_at")) % 6 == 0
        assert int(option(found, "lost_steps")) % 2


def test_two_moving_averages_are_of_one_model() -> None:
    assert option(adapted(TWO, "like(EMAModelAverager, decay=0.9)", 0), ONE_MODEL)
    assert not option(adapted(TWO, "like(DiLoCoModelAverager, period=3)", 0), ONE_MODEL)


def test_gossip_has_more_than_one_partner_in_long_runs() -> None:
    assert adapted(LONG, "like(GossipModelAverager, period=2)", 0).own_size == 4
    assert not adapted(LONG, "periodic(period=2)", 0).own_size


@pytest.mark.parametrize("claim", ["periodic(period=3)", "like(EMAModelAverager, decay=0.9)"])
def test_parameters_move_between_three_averages(claim: str) -> None:
    keeps_state = claim.startswith("like")
    for seed in range(10):
        found = adapted(MOVED, claim, seed)
        period = 1 if keeps_state else 3
        first, second = moves(found)
        assert 0 < first <= period < second <= 2 * period
        assert all(found.steps[step] == "crafted" for step in (first, second, 2 * period))
        indices = range(len(found.params))
        before = specs_at(found, 0)
        for move in (first, second):
            ways = {way(found, move, index) for index in indices}
            assert ways == {MEMORY, DTYPE} | (set() if keeps_state else {REPLACED})
            after = specs_at(found, move)
            for index in indices:
                has_changed = before[index].dtype != after[index].dtype
                assert has_changed == (way(found, move, index) == DTYPE)
                assert not (keeps_state and after[index].dtype == "float64")
            before = after
        assert way(found, 0, 0) == ""
    assert specs_at(CHANGING, 5) is CHANGING.params


@pytest.mark.parametrize(
    ("claim", "near_limit"),
    [
        ("periodic(period=4)", 2),
        ("like(GossipModelAverager, period=4)", 2),
        ("like(EMAModelAverager, decay=0.9)", 2),
        ("like(DiLoCoModelAverager, period=4)", 1),
        ("like(OuterStepModelAverager, period=4, lr=0.5)", 1),
        ("like(OuterStepModelAverager, period=4, lr=1.0)", 0),
    ],
)
def test_outer_steps_stay_in_the_range_of_float16(claim: str, near_limit: int) -> None:
    large = [kind for kind in adapted(NEAR_LIMIT, claim).steps if kind != QUIET]
    assert large == ["limit"] * near_limit + ["crafted"] * (2 - near_limit)
    special = [kind for kind in adapted(SPECIAL, claim).steps if kind != QUIET]
    assert special.count("limit") == min(near_limit, 1)
    assert len(special) == len(SPECIAL.steps)


def test_steps_that_are_rolled_back_show() -> None:
    for seed in range(20):
        for period in (1, 2, 4, 9):
            found = adapted(ROLLED_BACK, f"periodic(period={period}, warmup_steps=6)", seed)
            rolled = {step: rolled_back(found, step) for step in range(len(found.steps))}
            ((at, lost),) = [(at, lost) for at, lost in rolled.items() if lost is not None]
            assert lost > period or period == 1
            assert period == 1 or lost % period
            due = [step for step in range(at, len(found.steps)) if (step - 6) % period == 0]
            assert len(due) > 1
            assert found.steps[at] == "crafted"
