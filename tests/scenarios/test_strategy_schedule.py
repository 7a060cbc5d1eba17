"""Tests of the drawn numbers of strategies' scenarios."""

from conformance.scenarios.draws import drawn
from conformance.scenarios.strategy_schedule import part_of, turns
from conformance.scenarios.strategy_training import TURNS


def test_two_optimizers_each_step_alone_and_together() -> None:
    for seed in range(50):
        scenario = drawn(TURNS, seed)
        of_steps = [turns(scenario, step) for step in range(len(scenario.steps))]
        assert len(of_steps[0]) == 1
        assert (1 - of_steps[0][0],) in of_steps[1:3]
        assert (0, 1) in of_steps


def test_both_optimizers_have_parameters() -> None:
    for seed in range(50):
        scenario = drawn(TURNS, seed)
        parts = [part_of(scenario, index) for index in range(len(scenario.params))]
        assert min(parts.count(0), parts.count(1)) >= 2
