"""Tests of the backwards before the steps of optimizer wrappers, and of gradients of zeros."""

from conformance.scenarios.draws import drawn
from conformance.scenarios.gradients import uses
from conformance.scenarios.optimizer import PLAIN, UNUSED
from conformance.scenarios.optimizer_backwards import (
    ACCUMULATED,
    BY_MODEL,
    BY_NONE,
    BY_OPTIMIZER,
    DISCARDED,
    discards,
    factor_of,
    is_left_out,
    shares,
    way_of,
)
from conformance.scenarios.resting_parameter import rests

SEEDS = range(20)


def test_shares_of_a_gradient_add_up_to_it() -> None:
    for seed in SEEDS:
        scenario = drawn(ACCUMULATED, seed)
        indices = range(len(scenario.params))
        counts = []
        for step in range(len(scenario.steps)):
            parts = [shares(scenario, step, index) for index in indices]
            assert all(sum(part) == 1 for part in parts)
            (count,) = {len(part) for part in parts}
            assert all(any(of_backward) for of_backward in zip(*parts, strict=True))
            assert any(all(part) for part in parts)
            counts.append(count)
        assert sorted(counts) == [1, 1, 1, 1, 2, 2, 3, 3]


def test_gradients_are_scaled_after_one_backward_and_after_several() -> None:
    for seed in SEEDS:
        scenario = drawn(ACCUMULATED, seed)
        scaled = [s for s in range(len(scenario.steps)) if factor_of(scenario, s) != 1]
        assert sorted(len(shares(scenario, step, 0)) for step in scaled) == [1, 2, 3]


def test_other_scenarios_have_one_backward() -> None:
    assert shares(drawn(PLAIN, 3), 2, 1) == (1.0,)
    assert {factor_of(drawn(DISCARDED, 3), step) for step in range(8)} == {1.0}
    assert not discards(drawn(ACCUMULATED, 3), 0)


def test_gradients_are_dropped_before_three_steps() -> None:
    for seed in SEEDS:
        scenario = drawn(DISCARDED, seed)
        steps = [step for step in range(len(scenario.steps)) if discards(scenario, step)]
        assert len(steps) == 3
        assert steps[0] == 0
        ways = {way_of(scenario, step) for step in steps}
        assert ways == {BY_OPTIMIZER, BY_MODEL, BY_NONE}
        for step in range(len(scenario.steps)):
            left_out = [is_left_out(scenario, step, i) for i in range(len(scenario.params))]
            assert sum(left_out) == (step in steps)


def test_a_parameter_that_rests_has_had_a_gradient_on_every_rank() -> None:
    for seed in SEEDS:
        scenario = drawn(UNUSED, seed)
        resting = [(step, kind) for step, kind in enumerate(scenario.steps) if kind != "crafted"]
        assert len(resting) == 2
        for step, kind in resting:
            (index,) = [i for i in range(len(scenario.params)) if rests(kind, i)]
            assert all(uses(3, rank, step, index) for rank in range(3))
            assert any(
                all(uses(3, rank, earlier, index) for rank in range(3)) for earlier in range(step)
            )
