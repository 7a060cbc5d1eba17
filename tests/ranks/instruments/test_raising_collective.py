"""A collective of a hook that raises: which one it is, and how it shows."""

import pytest

from conformance.hosts.pool import Pool
from conformance.judging.rule import Rule
from conformance.judging.verdict import Found, Verdict
from conformance.ranks.instruments.raising_collective import REMEMBERED, RaisingCollective
from conformance.scenarios.draws import drawn
from conformance.scenarios.later_failures import (
    ATTEMPTS,
    BETWEEN_RAISES,
    LARGE_BETWEEN_RAISES,
    LARGE_LAST_RAISES,
    LAST_RAISES,
    LATE_RAISES,
    SCENARIOS,
)
from conformance.scenarios.model import Scenario
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims
from tests.hooks_ref.algorithms import try_hook
from tests.made_runs import event, made_run

LAST = -1


def raised_at(raising: RaisingCollective, issued: int, is_last_attempt: bool = False) -> int:
    """Return the number of the collective that raises in a step that may fail; 0 for none."""
    raising.begin_step()
    raising.arm(is_last_attempt)
    due = [number + 1 for number in range(issued) if raising.is_due()]
    raising.end_step()
    assert len(due) <= 1
    return due[0] if due else 0


def after_steps(succeeding: int, *counts: int) -> RaisingCollective:
    """Return the instrument after steps with so many collectives, none of which raised."""
    raising = RaisingCollective(succeeding)
    for count in counts:
        raising.begin_step()
        assert not any(raising.is_due() for _ in range(count))
        raising.end_step()
        # Of DDP or the trainer.
        assert not raising.is_due()
    return raising


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_each_place_of_a_step_raises(count: int) -> None:
    def places(*numbers: int) -> list[int]:
        return [raised_at(after_steps(number, count, count), count) for number in numbers]

    assert places(0, LAST) == [1, count]
    between = set(range(2, count)) or {count}
    assert set(places(*range(1, 50))) == between


def test_a_step_with_fewer_collectives_does_not_fail() -> None:
    raising = after_steps(LAST, 1, 3)
    assert [raised_at(raising, count) for count in (2, 0, 1, 3)] == [0, 0, 0, 3]


def test_a_subject_that_was_alone_is_watched_first() -> None:
    raising = after_steps(LAST, 0, 0)
    assert [raised_at(raising, count) for count in (0, 2, 0, 2)] == [0, 0, 0, 2]


def test_collectives_of_the_first_step_alone_are_forgotten() -> None:
    raising = after_steps(LAST, 5)
    tried = [raised_at(raising, 2) for _ in range(ATTEMPTS - 1)]
    assert tried.index(2) == REMEMBERED


def test_the_last_attempt_takes_the_first_collective() -> None:
    assert raised_at(after_steps(LAST, 2), 1, is_last_attempt=True) == 1


@pytest.mark.parametrize(
    ("claims", "given", "places"),
    [
        ("exact", {"hook": "hooks_ref:allreduce_hook"}, (1, 1)),
        # Its last collective is started by a callback.
        (
            "exact",
            {
                "hook": "hooks_ref:powerSGD_hook",
                "state": "examples.states:power_sgd_from_the_start",
            },
            (2, 2),
        ),
        (
            "exact",
            {"hook": "tests.mutants.swallows_later:one_piece_of_several_is_optional"},
            (3, 2),
        ),
        # It is alone in two of three steps.
        (
            "local(period=3)",
            {
                "hook": "tests.mutants.swallows_later:rare_means_may_be_parts",
                "state": "tests.mutants.swallows_later:Rare",
            },
            (2, 2),
        ),
    ],
    ids=str,
)
def test_the_last_collective_raises_and_one_between(
    pool: Pool, claims: str, given: dict[str, str], places: tuple[int, int]
) -> None:
    seen = []
    for scenario in (LAST_RAISES, BETWEEN_RAISES):
        run = try_hook(pool, adapt_scenario(scenario, parse_claims(claims)), **given)
        (fault,) = run.ranks[1].all("fault")
        assert not fault["unused"]
        assert [rank.exit for rank in run.ranks] == [0, 0]
        seen.append(fault["place"])
    assert tuple(seen) == places


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_steps_are_left_for_each_attempt(scenario: Scenario) -> None:
    for claims in ("exact", "compressed, warmup(3)", "local(period=4)"):
        for seed in range(20):
            made = adapt_scenario(scenario, parse_claims(claims), seed=seed)
            assert made.fault.attempts >= ATTEMPTS > REMEMBERED
            assert len(made.steps) == made.fault.step + made.fault.attempts


def test_the_collectives_and_steps_are_drawn() -> None:
    of_seeds = [[drawn(scenario, seed).fault for scenario in SCENARIOS] for seed in range(50)]
    by_name = dict(zip((s.name for s in SCENARIOS), zip(*of_seeds, strict=True), strict=True))
    for scenario in (BETWEEN_RAISES, LARGE_BETWEEN_RAISES):
        assert {fault.succeeding % 2 for fault in by_name[scenario.name]} == {0, 1}
    assert {fault.succeeding < 0 for fault in by_name[LATE_RAISES.name]} == {True, False}
    assert {fault.step for fault in by_name[LARGE_LAST_RAISES.name]} == {1, 2, 3, 4, 5}
    assert max(fault.step for fault in by_name[LATE_RAISES.name]) > 100


@pytest.mark.parametrize(
    ("claims", "expected"),
    [("exact", (Verdict.PASS, True)), ("local", (Verdict.NOT_APPLICABLE, False))],
)
def test_a_run_in_which_the_collective_never_comes_decides_nothing(
    rules: dict[str, Rule], claims: str, expected: tuple[Verdict, bool]
) -> None:
    run = made_run(scenario=LAST_RAISES)
    fields = {"unused": True, "started": 0, "raised": False, "place": 0}
    run.ranks[1].events.append(event("fault", 3, **fields))
    found = Found()
    rules["12.1"].check(run, parse_claims(claims), found)
    assert (found.verdict(), found.is_left_out) == expected
    assert [*found.notes, found.not_applicable][0] in (
        "last_raises@2: the collective that was to raise came in none of the steps",
        "the collective that was to raise came in none of the steps",
    )
