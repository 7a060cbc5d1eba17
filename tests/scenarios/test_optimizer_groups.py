"""Tests of the plans of parameter groups that leave out options."""

import random
from dataclasses import replace

import pytest

from conformance.scenarios.draws import drawn
from conformance.scenarios.optimizer import GROUPS
from conformance.scenarios.optimizer_groups import (
    OF_SGD,
    few_groups,
    leaving_out,
    many_groups,
    without_empty_groups,
)
from conformance.scenarios.optimizer_training import (
    ADAM_OPTIONS,
    MANY_GROUPS,
    OPTIONS,
    SAVED_GROUPS,
    plan_of,
)

SEEDS = range(20)


@pytest.mark.parametrize("scenario", [GROUPS, OPTIONS, ADAM_OPTIONS, SAVED_GROUPS], ids=str)
def test_a_first_group_and_an_added_one_leave_out_options(scenario: object) -> None:
    for seed in SEEDS:
        plan = plan_of(replace(scenario, session_seed=seed))  # type: ignore[type-var]
        first = plan.groups_at(-1)
        names = [set(plan.options) - set(options) for _, options in plan.groups]
        assert any(names[:first])
        assert all(names[first:])


def test_groups_of_sgd_have_no_dampening_with_nesterov() -> None:
    for seed in SEEDS:
        plan = plan_of(replace(OPTIONS, session_seed=seed))
        for _, options in plan.groups:
            chosen = {**plan.options, **options}
            assert not (chosen["nesterov"] and chosen["dampening"])


def test_few_groups_need_few_digits() -> None:
    for seed in SEEDS:
        plan = few_groups(random.Random(seed))
        for _, options in plan.groups:
            chosen = {**plan.options, **options}
            assert not (chosen["momentum"] and chosen["weight_decay"])
            assert chosen["weight_decay"] == 0 or chosen["lr"] >= 0.5


def test_options_that_go_together_are_left_out_together() -> None:
    options = {name: 1.0 for names in OF_SGD for name in names}
    for seed in SEEDS:
        draw = random.Random(seed)
        ((_, chosen),) = leaving_out([((0,), options)], draw, OF_SGD, added=0)
        assert ("nesterov" in chosen) == ("dampening" in chosen)


def test_the_rate_is_left_out_at_times_and_each_parameter_is_in_one_group() -> None:
    plans = [many_groups(50, random.Random(seed)) for seed in SEEDS]
    for plan in plans:
        assert sorted(index for indices, _ in plan.groups for index in indices) == list(range(50))
    assert any("lr" not in options for plan in plans for _, options in plan.groups)


def test_an_empty_group_is_in_front_of_another_one() -> None:
    for seed in SEEDS:
        plan = plan_of(drawn(MANY_GROUPS, seed))
        places = [place for place, (indices, _) in enumerate(plan.groups) if not indices]
        assert len(places) == 1
        assert places[0] < len(plan.groups) - 1
        assert all(indices for indices, _ in without_empty_groups(plan).groups)
