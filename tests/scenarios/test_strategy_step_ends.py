"""Tests of the drawn ends of strategies' steps."""

from conformance.scenarios.draws import drawn
from conformance.scenarios.strategy import RAISES
from conformance.scenarios.strategy_schedule import is_judged
from conformance.scenarios.strategy_step_ends import (
    WAYS_OF_CLEARING,
    cleared_parts,
    optimizers_step,
    way_of_clearing,
)
from conformance.scenarios.strategy_training import ABANDONED, LONG, SPECIAL


def test_steps_that_are_given_up_are_cleared_in_different_ways() -> None:
    for seed in range(30):
        for scenario in (drawn(ABANDONED, seed), drawn(RAISES, seed)):
            breaks = [at for at in range(len(scenario.steps)) if not is_judged(scenario, at)]
            ways = [way_of_clearing(scenario, at + 1) for at in breaks]
            assert len(set(ways[:3])) == len(ways[:3])


def test_all_ways_of_clearing_come() -> None:
    for seed in range(30):
        scenario = drawn(LONG, seed)
        assert {way_of_clearing(scenario, step) for step in range(3)} == set(WAYS_OF_CLEARING)


def test_of_a_step_that_is_given_up_the_micro_batches_before_are_cleared() -> None:
    for seed in range(30):
        scenario = drawn(ABANDONED, seed)
        for step in range(1, len(scenario.steps)):
            number = len(cleared_parts(scenario, step))
            assert number in ((3,) if is_judged(scenario, step - 1) else (1, 2))
    assert cleared_parts(ABANDONED, 0) == []


def test_an_optimizer_leaves_out_a_whole_step_too() -> None:
    for seed in range(30):
        scenario = drawn(ABANDONED, seed)
        of_steps = [optimizers_step(scenario, at) for at in range(len(scenario.steps))]
        whole = [at for at in range(len(scenario.steps)) if is_judged(scenario, at)]
        assert not any(of_steps[at] for at in set(range(len(of_steps))) - set(whole))
        assert [of_steps[at] for at in whole].count(False) == 1
        assert of_steps[-1]


def test_no_optimizer_steps_after_an_overflow() -> None:
    for seed in range(30):
        scenario = drawn(SPECIAL, seed)
        for step, kind in enumerate(scenario.steps):
            assert not (kind in ("nan", "inf") and optimizers_step(scenario, step))
