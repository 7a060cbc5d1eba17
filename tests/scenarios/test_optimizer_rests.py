"""Tests of parameters that rest, and of steps that are repeated, in scenarios for optimizers."""

import math
from itertools import pairwise

from conformance.scenarios.draws import drawn
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_gradients import freezes_late, has_gradient, is_frozen
from conformance.scenarios.optimizer_repeats import (
    ALL,
    PASSES,
    REPEATED_STEPS,
    repeated,
    source_step,
)
from conformance.scenarios.optimizer_rests import (
    RESTS,
    RESTS_OF_ADAM,
    common_rest,
    rests_of,
    zeros_at,
)
from conformance.scenarios.optimizer_states import RESTORED_OPTIONS, RESTORED_RATES
from conformance.scenarios.optimizer_training import (
    EMPTY,
    RESUMED_GROUPS,
    plan_of,
    wrapped_class,
)

SEEDS = range(20)


def test_every_parameter_has_a_gradient_in_the_last_steps() -> None:
    for seed in SEEDS:
        for scenario in (drawn(RESTS, seed), drawn(RESTS_OF_ADAM, seed)):
            indices = range(len(scenario.params))
            last = range(320, len(scenario.steps))
            for index in indices:
                used = [step for step in last if has_gradient(scenario, 2, None, step, index)]
                # One that is seldom used has a gradient in every 60th step at least.
                assert used or len(rests_of(scenario)[index].steps) > 320


def test_rests_are_long_and_short_with_and_without_frozen_parameters() -> None:
    for seed in SEEDS:
        scenario = drawn(RESTS, seed)
        for frozen in (False, True):
            plans = [rest for rest in rests_of(scenario) if rest.zeros is None]
            lengths = [len(rest.steps) for rest in plans if rest.is_frozen is frozen]
            assert max(lengths) >= 260
            assert sum(0 < length < 260 for length in lengths) == 2
        for index in range(len(scenario.params)):
            for step in range(len(scenario.steps)):
                rest = rests_of(scenario)[index]
                if rests_in_common(scenario, step, index) or step in rest.alone:
                    continue
                assert is_frozen(scenario, step, index) == (rest.is_frozen and step in rest.steps)
                rests = step in rest.steps and rest.zeros is None
                assert has_gradient(scenario, 2, 1, step, index) is not rests


def rests_in_common(scenario: Scenario, step: int, index: int) -> bool:
    common = common_rest(scenario)
    rests = step in common.frozen or step in common.without
    return step == common.nothing or (rests and index in common.indices)


def test_a_group_in_front_of_another_one_rests_frozen_and_thawed() -> None:
    for seed in SEEDS:
        for scenario in (drawn(RESTS, seed), drawn(RESTS_OF_ADAM, seed)):
            common = common_rest(scenario)
            plan = plan_of(scenario)
            assert plan.groups[common.place][0] == common.indices
            for step in (*common.frozen, *common.without):
                frozen = {is_frozen(scenario, step, index) for index in common.indices}
                assert frozen == {step in common.frozen}
                assert not any(has_gradient(scenario, 2, 0, step, i) for i in common.indices)
                behind = [i for indices, _ in plan.groups[common.place + 1 :] for i in indices]
                assert any(has_gradient(scenario, 2, 0, step, index) for index in behind)
            every = range(len(scenario.params))
            steps = range(len(scenario.steps))
            nobody = [
                step
                for step in steps
                if not any(has_gradient(scenario, 2, 1, step, index) for index in every)
            ]
            assert nobody == [common.nothing]
            assert not any(is_frozen(scenario, common.nothing, index) for index in every)
            assert max(*common.frozen, *common.without, common.nothing) < len(steps) - 5


def test_two_rests_end_on_one_rank_before_the_other() -> None:
    for seed in SEEDS:
        for scenario in (drawn(RESTS, seed), drawn(RESTS_OF_ADAM, seed)):
            first = set()
            for index, rest in enumerate(rests_of(scenario)):
                for step in rest.alone:
                    places = [p for p in range(2) if has_gradient(scenario, 2, p, step, index)]
                    assert places == [rest.first_place % 2]
                    assert has_gradient(scenario, 2, None, step, index)
                    assert rest.alone.start - 1 in rest.steps
                    assert all(
                        has_gradient(scenario, 2, place, rest.alone.stop, index)
                        for place in range(2)
                    )
                    first.add(rest.first_place % 2)
            assert first == {0, 1}


def test_gradients_are_zeros_for_long_and_in_turns_as_a_whole_and_in_rows() -> None:
    for seed in SEEDS:
        for scenario in (drawn(RESTS, seed), drawn(RESTS_OF_ADAM, seed)):
            plans = [rest for rest in rests_of(scenario) if rest.zeros]
            whole = [rest for rest in plans if rest.zeros == (0.0, 1.0)]
            assert len(whole) == len(plans) - len(whole) == 2
            for index, rest in enumerate(rests_of(scenario)):
                numel = math.prod(scenario.params[index].shape)
                counts = [len(zeros_at(scenario, step, index)) for step in sorted(rest.steps)]
                assert not any(
                    zeros_at(scenario, step, index)
                    for step in set(range(len(scenario.steps))) - rest.steps
                )
                if rest in whole:
                    assert set(counts) == {numel}
                elif rest.zeros and len(scenario.params[index].shape):
                    assert 0 < min(counts) == max(counts) < numel
                elif not rest.zeros:
                    assert not any(counts)


def test_counts_of_steps_differ_and_the_class_is_drawn() -> None:
    classes = {wrapped_class(drawn(RESTS_OF_ADAM, seed)) for seed in SEEDS}
    assert classes == {"Adam", "AdamW"}
    assert wrapped_class(drawn(RESTS, 3)) == "SGD"
    for seed in SEEDS:
        scenario = drawn(RESTS_OF_ADAM, seed)
        assert sum(0 in rest.steps for rest in rests_of(scenario)) >= 2


def test_parameters_that_are_frozen_late_have_a_gradient_once_more() -> None:
    for seed in SEEDS:
        scenario = drawn(EMPTY, seed)
        assert set(freezes_late(scenario)) == {2, 3, 4}
        for index, steps in freezes_late(scenario).items():
            assert has_gradient(scenario, 2, None, steps.start, index)
            assert all(is_frozen(scenario, step, index) for step in steps[1:])
            assert not is_frozen(scenario, steps.stop, index)
            assert steps.stop < len(scenario.steps)


def test_every_option_is_rewritten_before_and_after_the_state_that_is_restored() -> None:
    for seed in SEEDS:
        for scenario in (drawn(RESTORED_OPTIONS, seed), drawn(RESTORED_RATES, seed)):
            plan = plan_of(scenario)
            restored, saved = plan.back
            rises = {}
            for place, (_, made) in enumerate(plan.groups[:-1]):
                now = dict(made)
                for step in range(saved + 1):
                    now.update(plan.changes.get(step, {}).get(place, {}))
                later = dict(now)
                for step in range(saved + 1, restored):
                    later.update(plan.changes.get(step, {}).get(place, {}))
                others = set(now) - {"lr"}
                assert "weight_decay" in others
                assert all(later[name] != now[name] for name in others)
                rises[place] = later["weight_decay"] > now["weight_decay"]
            assert set(rises.values()) == {True, False}


def test_repeated_steps_have_the_gradients_of_the_first_pass() -> None:
    for scenario in (drawn(scenario, seed) for scenario in ALL for seed in SEEDS):
        restored, saved = repeated(scenario).back
        sources = [source_step(scenario, step) for step in range(len(scenario.steps))]
        first = sources[saved + 1 : restored]
        assert first == list(range(saved + 1, restored))
        assert len(first) == REPEATED_STEPS
        starts = (restored, *repeated(scenario).again)
        assert len(starts) == PASSES - 1
        assert {repeated(scenario).emptied, repeated(scenario).remade} == set(starts[-2:])
        for start in starts:
            assert sources[start : start + REPEATED_STEPS] == first
        outside = [step for step, source in enumerate(sources) if source not in first]
        assert [sources[step] for step in outside] == outside


def test_a_group_is_added_while_a_frozen_parameter_has_a_state() -> None:
    for seed in SEEDS:
        for scenario in (drawn(RESTS, seed), drawn(RESTS_OF_ADAM, seed)):
            plan = plan_of(scenario)
            (added,) = plan.added
            old = [index for indices, _ in plan.groups[:2] for index in indices]
            resting = [
                index
                for index in old
                if not has_gradient(scenario, 2, None, added, index)
                and any(has_gradient(scenario, 2, None, step, index) for step in range(added))
            ]
            frozen = [index for index in resting if is_frozen(scenario, added, index)]
            assert frozen
            assert len(resting) > len(frozen)


def test_options_are_written_after_few_steps_without_a_change_and_after_many() -> None:
    for seed in SEEDS:
        for scenario in (drawn(RESTS, seed), drawn(RESTS_OF_ADAM, seed)):
            plan = plan_of(scenario)
            changes = sorted({0, *plan.added, *plan.changes})
            unchanged = {step: step - before for before, step in pairwise(changes)}
            shorter, longer = sorted(unchanged[step] for step in plan.changes)
            assert 12 <= shorter <= 60
            assert longer >= 150
            for step, written in plan.changes.items():
                assert max(written) < plan.groups_at(step)
                names = {name for options in written.values() for name in options}
                assert names == set(plan.options)


def test_a_group_is_added_after_a_load_and_has_a_schedule_then() -> None:
    for seed in SEEDS:
        for scenario in (drawn(RESTORED_RATES, seed), drawn(RESTORED_OPTIONS, seed)):
            plan = plan_of(scenario)
            first, last = plan.added
            restored, saved = plan.back
            assert first <= saved < restored <= last < len(scenario.steps) - 1
            place = len(plan.groups) - 1
            assert any(place in plan.changes.get(step, {}) for step in range(last + 1, 10))
            assert not any(place in plan.changes.get(step, {}) for step in range(last))
        scenario = drawn(RESUMED_GROUPS, seed)
        plan = plan_of(scenario)
        first, last = plan.added
        assert first < plan.saves_at <= last
        assert 3 in plan.changes[last + 1]
