"""Tests of the backwards before the steps of optimizer wrappers, and of gradients of zeros."""

import math

import torch

from conformance.scenarios.draws import drawn
from conformance.scenarios.gradients import uses
from conformance.scenarios.optimizer import CLOSURE, PLAIN, UNUSED
from conformance.scenarios.optimizer_backwards import (
    ACCUMULATED,
    ASSIGNED,
    ASSIGNED_LAID_OUT,
    CHANGED_IN,
    DISCARDED,
    EARLY,
    IN_HALF,
    NEW_TENSOR,
    WAYS,
    Changing,
    Layout,
    assigned_before,
    averages_first,
    change_before,
    drop_before,
    factors_of,
    is_left_out,
    layout_of,
    shares,
    zero_rows,
)
from conformance.scenarios.optimizer_closures import CLOSURE_IN_PARTS, comes_in_parts
from conformance.scenarios.optimizer_states import SCALED
from conformance.scenarios.optimizer_training import plan_of
from conformance.scenarios.optimizer_wide_gradients import WIDE, factor_and_shift, widened
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
        assert sorted(counts) == [1] * 7 + [2] * 4 + [3] * 3


def test_gradients_are_changed_in_each_way_after_one_backward_and_after_several() -> None:
    for seed in SEEDS:
        for scenario in (drawn(one, seed) for one in (ACCUMULATED, *IN_HALF)):
            forms: dict[bool, list[tuple[Changing, str]]] = {False: [], True: []}
            unchanged = []
            for step in range(len(scenario.steps)):
                several = len(shares(scenario, step, 0)) > 1
                if change := change_before(scenario, step):
                    forms[several].append((change.kind, change.way))
                else:
                    unchanged.append(several)
            assert sorted(unchanged) == [False, True]
            for changes in forms.values():
                scaled = {way for kind, way in changes if kind is Changing.SCALED}
                others = {kind: way for kind, way in changes if kind is not Changing.SCALED}
                assert scaled == set(CHANGED_IN)
                assert len(others) == len(Changing) - 1
                assert set(others.values()) == set(CHANGED_IN)


def test_factors_of_elements_are_those_of_the_change() -> None:
    for seed in SEEDS:
        scenario = drawn(ACCUMULATED, seed)
        for step in range(len(scenario.steps)):
            change = change_before(scenario, step)
            kind = change.kind if change else Changing.SUM
            for index, spec in enumerate(scenario.params):
                factors = factors_of(scenario, step, index)
                assert len(factors) == math.prod(spec.shape)
                if kind is Changing.SUM:
                    assert set(factors) == {1.0}
                elif kind is Changing.ROWS and spec.shape:
                    rows = zero_rows(scenario, step, index)
                    whole = torch.tensor(factors).view(spec.shape)
                    assert not whole[rows].any()
                    assert whole.count_nonzero() == whole.numel() - whole[rows].numel() > 0
                elif kind is Changing.SCALED:
                    assert {change and change.factor} == set(factors) != {1.0}


def test_other_scenarios_have_one_backward() -> None:
    assert shares(drawn(PLAIN, 3), 2, 1) == (1.0,)
    assert not any(change_before(drawn(DISCARDED, 3), step) for step in range(8))
    assert drop_before(drawn(ACCUMULATED, 3), 0) is None


def test_gradients_are_dropped_in_each_way_averaged_and_not() -> None:
    for seed in SEEDS:
        scenario = drawn(DISCARDED, seed)
        steps = range(len(scenario.steps))
        drops = {step: drop for step in steps if (drop := drop_before(scenario, step))}
        assert 0 in drops
        forms = {(drop.way, drop.is_averaged, drop.averages_after) for drop in drops.values()}
        after = ((True, True), (True, False), (False, False))
        assert forms == {(way, *form) for way in WAYS for form in after}
        assert {drop.enters for drop in drops.values() if drop.is_averaged} == {True, False}
        for step in steps:
            drop = drops.get(step)
            left_out = [is_left_out(scenario, step, i) for i in range(len(scenario.params))]
            assert sum(left_out) == (drop is not None)
            assert averages_first(scenario, step) == (drop is not None and drop.averages_after)


def test_gradients_of_some_and_of_all_parameters_are_written_in_each_way() -> None:
    for seed in SEEDS:
        scenario = drawn(ASSIGNED, seed)
        plans = [assigned_before(scenario, step) for step in range(len(scenario.steps))]
        assert plans.count(None) == 3
        assert plans[0] is None or plans[0].way == NEW_TENSOR
        count = len(scenario.params)
        forms = [(p.way, len(p.indices) == count, p.is_first) for p in plans if p]
        of_some = [(way, False, is_first) for way in CHANGED_IN for is_first in (False, True)]
        assert sorted(forms) == sorted([*of_some, *((way, True, True) for way in CHANGED_IN)])
        assert all(p.indices for p in plans if p)
    assert assigned_before(drawn(ACCUMULATED, 3), 0) is None


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


def test_a_backward_after_synchronize_adds_to_gradients_in_each_form_of_a_step() -> None:
    for seed in SEEDS:
        scenario = drawn(EARLY, seed)
        forms = set()
        for step in range(len(scenario.steps)):
            parts = [shares(scenario, step, index) for index in range(len(scenario.params))]
            assert all(sum(part) == 1 for part in parts)
            assert {(0.5, 0.5), (1.0, 0.0)} <= set(parts)
            forms.add((averages_first(scenario, step), (0.0, 1.0) in parts))
        assert len(forms) == 4


def test_wide_gradients_cancel_and_need_the_bits_and_the_range_of_their_dtype() -> None:
    for seed in SEEDS:
        scenario = drawn(WIDE, seed)
        indices = range(len(scenario.params))
        assert {spec.dtype for spec in scenario.params} == {"float16", "bfloat16", "float32"}
        wide = [widened(scenario, index) for index in indices]
        assert {one.takes_any for one in wide if one} == {True, False}
        factors = []
        for step in range(len(scenario.steps)):
            rate = plan_of(scenario).rates[step]
            for size in (2, 3):
                for index, one in enumerate(wide):
                    assert one is not None
                    drawn_numbers = [
                        factor_and_shift(scenario, step, index, place, size)
                        for place in range(size)
                    ]
                    ((factor,), shifts) = (set(row) for row in zip(*drawn_numbers, strict=True))
                    assert sum(shifts) == 0
                    assert rate is not None
                    assert 0.05 <= rate * factor <= 0.1
                    # The values are 2**-3 to 2**8; the gradient's dtype holds them beside the
                    # shift, and the parameter's does not.
                    narrow = torch.finfo(getattr(torch, scenario.params[index].dtype))
                    held = torch.finfo(getattr(torch, one.dtype))
                    shift = max(shifts) / factor
                    assert shift * narrow.eps >= 2**5
                    assert 2 * shift * held.eps <= 2**-3
            factors.append(factor)
        half = torch.finfo(torch.float16)
        assert sum(factor * 2**8 > half.max for factor in factors) == 2
        assert sum(factor * 2**8 < half.smallest_normal for factor in factors) == 2


def test_two_backwards_break_off_after_a_gradient_at_least() -> None:
    for seed in SEEDS:
        scenario = drawn(DISCARDED, seed)
        drops = [drop_before(scenario, step) for step in range(len(scenario.steps))]
        broken = [drop for drop in drops if drop and drop.breaks_off is not None]
        assert len({drop.way for drop in broken}) == len(broken) == 2
        for drop in broken:
            assert not drop.is_averaged
            assert drop.breaks_off in range(len(scenario.params) - 1)


def test_written_gradients_have_layouts_of_their_own() -> None:
    for seed in SEEDS:
        scenario = drawn(ASSIGNED_LAID_OUT, seed)
        found = {
            layout_of(scenario, step, index)
            for step in range(len(scenario.steps))
            for index in range(len(scenario.params))
        }
        assert found == set(Layout)
        assert layout_of(drawn(ASSIGNED, seed), 0, 0) is Layout.OWN


def test_each_group_overflows_alone_once_it_is_there() -> None:
    for seed in SEEDS:
        plan = plan_of(drawn(SCALED, seed))
        assert plan.scaling is not None
        within = plan.scaling.within
        (added,) = plan.added
        (of_second,) = (step for step, some in within.items() if some == plan.groups[1][0])
        (of_added,) = (step for step, some in within.items() if some == plan.groups[2][0])
        assert added < of_added
        assert of_second != plan.scaling.alone != of_added
        assert {of_second, of_added} < set(plan.scaling.everywhere)
        assert not set(within) & set(plan.scaling.lacking)


def test_half_of_the_closures_add_to_gradients_that_are_there() -> None:
    for seed in SEEDS:
        scenario = drawn(CLOSURE_IN_PARTS, seed)
        steps = range(len(scenario.steps))
        assert sum(comes_in_parts(scenario, step) for step in steps) == len(steps) // 2
        assert not comes_in_parts(drawn(CLOSURE, seed), 0)
