"""Tests of the drawn numbers of strategies' scenarios."""

import math

import pytest

from conformance.scenarios.draws import drawn
from conformance.scenarios.interrupts import CAUGHT, OUT_OF_MEMORY
from conformance.scenarios.model import Scenario
from conformance.scenarios.strategy import SHARED, SUBGROUPS
from conformance.scenarios.strategy_breaks import BEFORE, comes_again, way_of_break
from conformance.scenarios.strategy_dtypes import gradient_spec, held_in, narrow_steps
from conformance.scenarios.strategy_passes import (
    ALTERNATING,
    ASKED,
    FORWARDS_FIRST,
    IN_PARTS,
    ONCE,
    RETAINED,
    Passes,
    first_penalty,
    passes_of,
)
from conformance.scenarios.strategy_rates import (
    GROUPS,
    classes,
    rates,
    resting_groups,
    schedule_keys,
)
from conformance.scenarios.strategy_schedule import (
    abandoned_after,
    batches,
    clears_to_zeros,
    fails_and_goes_on,
    has_forward_alone,
    is_empty,
    is_last,
    part_of,
    raised_in,
    trained_from,
    turns,
    uses,
)
from conformance.scenarios.strategy_training import (
    BUFFERS,
    EMPTY,
    GRADIENT_DTYPES,
    LARGE_DTYPES,
    PARTS,
    PASSES,
    PENALTIES,
    RECOVERED,
    TURNS,
    TWO,
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
        assert passes_of(adapt(PASSES, {claim: {}}), 0, 1).times(0) == 1
        penalties = adapt(drawn(PENALTIES, 0), {claim: {}})
        assert {passes.way for passes in all_passes(penalties)} == {ONCE, ALTERNATING}


def all_passes(scenario: Scenario) -> list[Passes]:
    return [
        passes_of(scenario, step, batch)
        for step in range(len(scenario.steps))
        for batch in range(batches(scenario, step))
    ]


@pytest.mark.parametrize("claims", [{}, {"counts": {"name": "2"}}])
def test_the_last_micro_batch_alone_has_the_first_penalty(
    claims: dict[str, dict[str, str]],
) -> None:
    lengths = set()
    for seed in range(50):
        scenario = KINDS["strategy"].adapt(drawn(PENALTIES, seed), claims)
        lengths.add(len(scenario.steps))
        numbers = [
            [passes_of(scenario, step, batch) for batch in range(batches(scenario, step))]
            for step in range(len(scenario.steps))
        ]
        counts = [[1 if one.way == ONCE else one.count for one in step] for step in numbers]
        first = first_penalty(scenario)
        assert first > 0
        assert all(count == 1 for step in counts[:first] for count in step)
        assert counts[first] == [1] * (len(counts[first]) - 1) + [2]
        assert counts[-1] == [1] * (len(counts[-1]) - 1) + [3]
        assert any(step[-1] == 1 and 2 in step for step in counts[first + 1 : -1])
    assert (min(lengths), max(lengths)) == (10, 24)


def test_parameters_are_used_before_and_after_a_failed_micro_batch_alone() -> None:
    for seed in range(50):
        scenario = drawn(RECOVERED, seed)
        failed = [fails_and_goes_on(scenario, step) for step in range(len(scenario.steps))]
        again = [step for step in range(len(failed)) if comes_again(scenario, step)]
        assert len(again) == 2
        assert len([at for step, at in enumerate(failed) if step not in again and not at]) == 4
        for step, at in enumerate(failed):
            ends = [
                batch for batch in range(batches(scenario, step)) if is_last(scenario, step, batch)
            ]
            assert ends == [batches(scenario, step) - 1] or (step in again and ends[0] == at)
            assert len(ends) == 1 + (step in again)
            number = batches(scenario, step)
            assert at is not None
            assert at < number - 1
            used = {
                tuple(uses(scenario, 2, 0, step, batch, index) for batch in range(number))
                for index in range(len(scenario.params))
            }
            assert tuple(batch > at for batch in range(number)) in used
            assert tuple(batch < at for batch in range(number)) in used
            in_it_alone = tuple(batch == at for batch in range(number))
            assert (in_it_alone in used) == (way_of_break(scenario, step) != BEFORE)
        raised = [raised_in(scenario, step) for step in range(len(failed))]
        # After a micro-batch that has made gradients, and with some of its own.
        later = [step for step, at in enumerate(failed) if at]
        with_gradients = [at for at in later if way_of_break(scenario, at) != BEFORE]
        assert OUT_OF_MEMORY in [raised[step] for step in with_gradients]
        assert {raised[step] for step in with_gradients} & {*CAUGHT} - {OUT_OF_MEMORY}
        assert {raised[step] for step in later if step not in with_gradients} <= {*CAUGHT}


def test_gradients_become_wider_than_their_parameters() -> None:
    for seed in range(50):
        scenario = KINDS["strategy"].adapt(drawn(GRADIENT_DTYPES, seed), {})
        assert 8 <= len(scenario.steps) <= 16
        last = len(scenario.steps) - 1
        assert 0 in narrow_steps(scenario, 0)
        assert gradient_spec(scenario, 0, 0).dtype == "bfloat16"
        for index, spec in enumerate(scenario.params):
            wide = [gradient_spec(scenario, last - back, index) for back in range(3)]
            assert {one.dtype for one in wide} == {spec.dtype}
            if index == 1 or spec.dtype == "float64":
                least, none, most = sorted(one.exponent for one in wide)
                assert least <= -40
                assert none == 0
                assert most >= 40


def test_groups_rest_at_first_at_last_and_with_all_of_their_optimizer() -> None:
    for seed in range(50):
        scenario = drawn(SHARED, seed)
        steps = [resting_groups(scenario, step) for step in range(len(scenario.steps))]
        at_begin, *steps = steps
        assert len(at_begin) == GROUPS
        assert not any(rates(scenario, 0))
        assert all(len(resting) < GROUPS for resting in steps)
        at_first = [group for group in steps[0] & steps[1] if any(group not in s for s in steps)]
        at_last = [group for group in steps[-1] if group not in steps[0]]
        assert at_first
        assert at_last
        assert any({0, 1} <= resting for resting in steps)
        assert any({2, 3} <= resting for resting in steps)
        assert [rate == 0 for rate in rates(scenario, 1)] == [g in steps[0] for g in range(GROUPS)]
        keys = [schedule_keys(scenario, optimizer) for optimizer in range(2)]
        assert sorted(map(len, keys)) == [1, 3]
        names = [name for name, _ in classes(scenario)]
        assert len(names) == len(set(names))
        assert "SGD" in names


def test_gradients_are_zeros_when_others_come() -> None:
    for seed in range(50):
        scenario = drawn(UNFROZEN, seed)
        indices = range(len(scenario.params))
        steps = {trained_from(scenario, index) for index in indices} - {0}
        assert len(steps) == 2
        for step in steps:
            assert step < len(scenario.steps) - 1
            assert all(clears_to_zeros(scenario, step, index) for index in indices)


def test_some_gradients_are_dropped_and_others_are_zeros_if_all_are_used() -> None:
    for seed in range(50):
        scenario = KINDS["strategy"].adapt(drawn(UNFROZEN, seed), {"all_used": {}})
        indices = range(len(scenario.params))
        of_steps = [
            [clears_to_zeros(scenario, step, index) for index in indices]
            for step in range(1, len(scenario.steps))
        ]
        assert any(any(of_step) and not all(of_step) for of_step in of_steps)
        assert all(uses(scenario, 2, 0, 3, 1, index) for index in indices)


def test_large_parameters_have_gradients_of_another_dtype() -> None:
    sizes = []
    for seed in range(50):
        scenario = KINDS["strategy"].adapt(drawn(LARGE_DTYPES, seed), {})
        for index, spec in enumerate(scenario.params[:2]):
            held = held_in(scenario, index)
            assert held is not None
            assert held.dtype in ("float16", "bfloat16")
            assert spec.dtype in ("float32", "float64")
        assert 0 in narrow_steps(scenario, 0)
        sizes += sorted(math.prod(spec.shape) for spec in scenario.params[:2])
    assert all(2**20 <= size < 2**22 for size in sizes[1::2])
    assert min(sizes) < 2**14 < 2**18 < max(sizes[::2])


def test_half_precision_has_gradients_of_float32() -> None:
    for seed in range(20):
        scenario = drawn(GRADIENT_DTYPES, seed)
        held = held_in(scenario, 0)
        assert held is not None
        assert (held.dtype, scenario.params[0].dtype) == ("bfloat16", "float32")


def test_no_rank_has_a_backward_in_a_last_and_in_an_earlier_micro_batch() -> None:
    forwards = set()
    for seed in range(50):
        scenario = drawn(EMPTY, seed)
        for size in (2, 3):
            skipped = [
                (step, batch)
                for step in range(len(scenario.steps))
                for batch in range(batches(scenario, step))
                if all(is_empty(scenario, size, place, step, batch) for place in range(size))
            ]
            assert len({step for step, _ in skipped}) == len(skipped) == 2
            last = batches(scenario, 0) - 1
            assert [batch == last for _, batch in skipped].count(True) == 1
            forwards |= {
                has_forward_alone(scenario, size, place, *part)
                for place in range(size)
                for part in skipped
            }
    assert forwards == {False, True}


def test_parameters_of_two_models_are_used_before_and_after_the_others_last_micro_batch() -> None:
    for seed in range(20):
        scenario = drawn(TWO, seed)
        for step in range(len(scenario.steps)):
            used = {
                tuple(uses(scenario, 2, 0, step, batch, index) for batch in range(2))
                for index in range(len(scenario.params))
            }
            assert {(True, True), (True, False), (False, True)} <= used


def test_groups_lack_gradients_together_alone_and_not_at_all() -> None:
    for seed in range(20):
        scenario = drawn(SUBGROUPS, seed)
        lacking = {
            tuple(
                not all(
                    uses(scenario, 2, place, step, 0, index, first_rank)
                    for place in range(2)
                    for index in range(len(scenario.params))
                )
                for first_rank in (0, 1)
            )
            for step in range(len(scenario.steps))
        }
        assert lacking == {(True, True), (True, False), (False, True), (False, False)}


def test_buffers_are_judged_after_an_exception_and_after_a_step_that_is_given_up() -> None:
    for seed in range(50):
        scenario = drawn(BUFFERS, seed)
        every = range(len(scenario.steps))
        (failed,) = [step for step in every if fails_and_goes_on(scenario, step) is not None]
        (given_up,) = [step for step in every if abandoned_after(scenario, step) is not None]
        assert failed != given_up
        assert not is_last(scenario, failed, fails_and_goes_on(scenario, failed) or 0)
        assert 0 < (abandoned_after(scenario, given_up) or 0) < batches(scenario, given_up)
        assert [step for step in every if step > failed and step - given_up not in (0, 1)]
        assert given_up + 2 in every
