"""Tests of the drawn numbers of scenarios for averagers in ordinary training loops."""

import pytest
import torch

from conformance.scenarios.averager import FORMS, PLAIN, RANDOM
from conformance.scenarios.averager_loops import (
    ALL,
    CLOSE,
    IDLE,
    OVERFLOWS,
    is_grad_mode_off,
    is_of_subclass,
    overflow,
)
from conformance.scenarios.averager_training import (
    IDLE_FROZEN,
    IDLE_NONE,
    LONG,
    MODELS_COME,
    is_frozen,
    is_given,
    is_idle,
    option,
)
from conformance.scenarios.averager_values import has_gradient, source, values_of
from conformance.scenarios.averaging_schedule import MAX_STEPS, QUIET
from conformance.scenarios.draws import drawn
from conformance.scenarios.model import Scenario
from conformance.subjects.claims import parse_claims
from conformance.subjects.kinds._averager_schedule import adapt, schedule_of

PERIODIC = "periodic(period=4, warmup_steps=10)"


def adapted(scenario: Scenario, text: str, seed: int = 0) -> Scenario:
    return adapt(drawn(scenario, seed), parse_claims(text, "averager").options)


def due_steps(scenario: Scenario, text: str) -> list[int]:
    schedule = schedule_of(parse_claims(text, "averager").options)
    assert schedule is not None
    return [step for step in range(len(scenario.steps)) if schedule.is_due(step)]


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_long_schedules_end_in_time(scenario: Scenario) -> None:
    for text in ("periodic(period=2400)", "periodic(period=300, warmup_steps=900)"):
        found = adapted(scenario, text)
        due = due_steps(found, text)
        assert len(found.steps) <= MAX_STEPS + 1
        assert sum(found.steps[step] != QUIET for step in due) > 1


def test_gradients_overflow_on_one_rank_and_on_all() -> None:
    for seed in range(10):
        found = adapted(OVERFLOWS, PERIODIC, seed)
        indices = range(len(found.params))
        extents = set()
        values = set()
        for step in due_steps(found, PERIODIC):
            ranks = [[overflow(found, 2, place, step, i) for i in indices] for place in (0, 1)]
            some = [one for rank in ranks for one in rank if one is not None]
            values |= {one.value for one in some}
            extents.add((all(map(any, ranks)), len(some), some[0].element is None))
        assert values == {"inf", "-inf", "nan", "largest"}
        assert extents == {
            (False, 1, False),
            (False, 1, True),
            (False, 5, True),
            (True, 2, False),
            (True, 2, True),
            (True, 10, True),
        }
    assert overflow(RANDOM, 2, 0, 0, 0) is None


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 8])
def test_means_of_close_ranks_are_exact_in_any_order(size: int) -> None:
    group = tuple(range(size))
    for seed in range(5):
        found = adapted(CLOSE, PERIODIC, seed)
        for step in due_steps(found, PERIODIC):
            for index, spec in enumerate(found.params):
                values = torch.stack(
                    [
                        values_of(source(found, group, place, step, index), spec, size, index)
                        for place in group
                    ]
                )
                mean = values.double().mean(0)
                assert torch.equal(mean.float().double(), mean)
                assert torch.equal(sum(values) / size, mean.float())
                assert torch.equal(sum(value / size for value in values.flip(0)), mean.float())
                assert torch.equal(sum(value * (1 / size) for value in values), mean.float())
                if size > 1:
                    assert (values[0] != values[1]).all()


def test_ranks_are_close_and_small() -> None:
    spreads = []
    magnitudes = []
    for seed in range(20):
        found = adapted(CLOSE, PERIODIC, seed)
        for step in due_steps(found, PERIODIC):
            largest = []
            for index, spec in enumerate(found.params):
                one, other = (
                    values_of(source(found, (0, 1), place, step, index), spec, 2, index).double()
                    for place in (0, 1)
                )
                largest.append(((one - other) / one).abs().max().item())
                magnitudes.append(one.abs().max().item())
            spreads.append(max(largest))
        # In two of three steps whole models are close.
        assert sum(spread < 3e-5 for spread in spreads[-6:]) == 4
    assert 1e-2 < max(spreads) < 0.06
    assert min(spreads) < 8e-6
    assert min(magnitudes) < 1e-7
    assert max(magnitudes) > 100


def test_idle_steps_show_a_lost_count() -> None:
    for seed in range(20):
        found = adapted(IDLE, PERIODIC, seed)
        due = due_steps(found, PERIODIC)
        idle = [step for step in range(len(found.steps)) if is_idle(found, step)]
        assert all(found.steps[step] == "crafted" for step in idle)
        assert [step for step in idle if step in due] == [due[3], due[5]]
        assert any(0 < step < 10 for step in idle)
        for first, second in ((due[0], due[1]), (due[1], due[2])):
            assert 0 < sum(first < step < second for step in idle) < 4
        frozen = {int(step) for step in option(found, IDLE_FROZEN).split()}
        nothing = {int(step) for step in option(found, IDLE_NONE).split()}
        assert frozen
        assert nothing
        assert not frozen & nothing
        for step in range(len(found.steps)):
            assert is_frozen(found, step, 0) == (step in frozen)
            assert is_given(found, step, 0) == (step not in nothing)


def test_an_averager_with_a_state_has_no_idle_average() -> None:
    for text in ("like(DiLoCoModelAverager, period=4)", "like(EMAModelAverager, decay=0.9)"):
        found = adapted(IDLE, text)
        assert not [step for step in due_steps(found, text) if is_idle(found, step)]


def test_the_call_is_drawn() -> None:
    off = [is_grad_mode_off(drawn(PLAIN, 3), step) for step in range(30)]
    assert 5 < sum(off) < 25
    assert not any(is_grad_mode_off(drawn(RANDOM, 3), step) for step in range(30))
    places = set()
    for seed in range(40):
        found = adapted(FORMS, PERIODIC, seed)
        ((frozen, _),) = [(i, spec) for i, spec in enumerate(found.params) if spec.frozen]
        places.add(frozen)
        chosen = [index for index in range(len(found.params)) if is_of_subclass(found, index)]
        assert len(chosen) == 2
        assert frozen not in chosen
    assert places == {0, 1, 3, 4, 5}
    assert not is_of_subclass(PLAIN, 0)


def test_a_parameter_has_its_first_gradient_late_and_another_rests_as_long() -> None:
    for seed in range(10):
        found = adapted(LONG, PERIODIC, seed)
        dues = due_steps(found, PERIODIC)
        resting = {
            index: [step for step in dues if not has_gradient(found, 2, 1, step, index)]
            for index in range(len(found.params))
        }
        (late,) = (steps for steps in resting.values() if dues[0] in steps)
        (between,) = (steps for steps in resting.values() if steps and dues[0] not in steps)
        for steps in (late, between):
            first = dues.index(steps[0])
            assert steps == dues[first : first + len(steps)]
            assert 17 <= len(steps) <= 150
            assert first + len(steps) <= 2 * len(dues) // 3
    assert adapted(LONG, "periodic(period=100, warmup_steps=0)").options == (
        *LONG.options,
        f"{MODELS_COME}=1",
    )


def test_no_parameter_rests_under_like() -> None:
    found = adapted(LONG, "like(EMAModelAverager, decay=0.9)")
    assert all(has_gradient(found, 2, 0, step, 0) for step in range(len(found.steps)))
