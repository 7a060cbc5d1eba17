"""Tests of the plans of two optimizers of two models."""

from dataclasses import replace

import pytest

from conformance.scenarios.averager_training import turn
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import PLAIN
from conformance.scenarios.optimizer_pairs import pair_of
from conformance.scenarios.optimizer_training import TWO, TWO_GROUPS, plan_of
from conformance.scenarios.optimizer_twins import plan_of_model
from conformance.subjects.kinds.optimizer import OPTIMIZER

SEEDS = range(50)


@pytest.mark.parametrize("base", [TWO, TWO_GROUPS], ids=str)
def test_each_model_has_a_construction_and_an_added_group_of_its_own(base: Scenario) -> None:
    for seed in SEEDS:
        scenario = OPTIMIZER.adapt(replace(base, session_seed=seed), {})
        plans = [plan_of_model(scenario, model) for model in (0, 1)]
        assert plans[0].options["lr"] != plans[1].options["lr"]
        for model, plan in enumerate(plans):
            (added,) = plan.added
            assert turn(scenario, added)[0] == model
            pair = pair_of(scenario, added)
            assert pair is None or pair.first == added
            assert not plan.groups[-1][1]
            assert sorted(len(options) for _, options in plan.groups[:2]) in ([0, 2], [1, 2])


def test_a_written_rate_is_another_one_than_before() -> None:
    for seed in SEEDS:
        scenario = OPTIMIZER.adapt(replace(TWO, session_seed=seed), {})
        for model in (0, 1):
            plan = plan_of_model(scenario, model)
            ((step, written),) = plan.changes.items()
            ((place, options),) = written.items()
            assert turn(scenario, step)[0] == model
            assert options["lr"] != {**plan.options, **plan.groups[place][1]}["lr"]


def test_other_scenarios_have_one_plan() -> None:
    assert plan_of_model(PLAIN, 1) == plan_of(PLAIN)
