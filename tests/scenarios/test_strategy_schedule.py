"""Tests of the drawn numbers of strategies' scenarios."""

from conformance.scenarios.draws import drawn
from conformance.scenarios.strategy_dtypes import held_in
from conformance.scenarios.strategy_passes import (
    ASKED,
    FORWARDS_FIRST,
    IN_PARTS,
    RETAINED,
    passes_of,
)
from conformance.scenarios.strategy_schedule import (
    batches,
    clears_to_zeros,
    part_of,
    trained_from,
    turns,
)
from conformance.scenarios.strategy_training import (
    GRADIENT_DTYPES,
    PARTS,
    PASSES,
    TURNS,
    UNFROZEN,
)
from conformance.subjects.kinds import KINDS


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


def test_last_micro_batches_have_all_ways_of_passes() -> None:
    for seed in range(20):
        for scenario, ways in ((PASSES, {RETAINED, FORWARDS_FIRST}), (PARTS, {ASKED, IN_PARTS})):
            run = drawn(scenario, seed)
            last = [passes_of(run, step, batches(run, step) - 1) for step in range(len(run.steps))]
            assert {passes.way for passes in last} == ways
            assert all(0 < len(passes.some) < len(run.params) for passes in last)


def test_a_strategy_of_ddps_own_averages_gets_no_second_pass() -> None:
    adapt = KINDS["strategy"].adapt
    assert adapt(PASSES, {}).variant == PASSES.variant
    for claim in ("all_used", "find_unused"):
        assert passes_of(adapt(PASSES, {claim: {}}), 0, 1).times == 1


def test_gradients_are_zeros_when_others_come() -> None:
    for seed in range(50):
        scenario = drawn(UNFROZEN, seed)
        indices = range(len(scenario.params))
        steps = {trained_from(scenario, index) for index in indices} - {0}
        assert len(steps) == 2
        for step in steps:
            assert step < len(scenario.steps) - 1
            assert all(clears_to_zeros(scenario, step, index) for index in indices)


def test_half_precision_has_gradients_of_float32() -> None:
    for seed in range(20):
        scenario = drawn(GRADIENT_DTYPES, seed)
        held = held_in(scenario, 0)
        assert held is not None
        assert (held.dtype, scenario.params[0].dtype) == ("bfloat16", "float32")
