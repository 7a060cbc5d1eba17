"""The drawn orders in which gradients arrive."""

import math
from dataclasses import replace

import pytest
import torch

from conformance.ranks.models.probe import Probe
from conformance.scenarios.arrival import arrival_order
from conformance.scenarios.optimizer import PLAIN
from conformance.scenarios.optimizer_backwards import ACCUMULATED, DISCARDED
from conformance.scenarios.optimizer_training import OWN
from conformance.scenarios.strategy import PLAIN as STRATEGY
from conformance.scenarios.strategy import RANDOM

SCENARIOS = [replace(one, session_seed=5) for one in (STRATEGY, RANDOM, OWN, ACCUMULATED)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_in_half_of_the_steps_ranks_have_other_orders(scenario):
    steps = range(len(scenario.steps))
    orders = {
        (step, rank): arrival_order(scenario, step, rank) for step in steps for rank in (0, 1)
    }
    for order in orders.values():
        assert sorted(order) == list(range(len(scenario.params)))
    apart = [step for step in steps if orders[step, 0] != orders[step, 1]]
    assert len(apart) == math.ceil(len(steps) / 2)
    # Collectives of gradients that are mixed up must not fail by their sizes.
    for step in apart:
        for one, other in zip(orders[step, 0], orders[step, 1], strict=True):
            shapes = [scenario.params[index].shape for index in (one, other)]
            assert math.prod(shapes[0]) == math.prod(shapes[1])
    assert len({tuple(orders[step, 0]) for step in steps}) > 1


@pytest.mark.parametrize("scenario", [PLAIN, DISCARDED], ids=lambda one: one.name)
def test_other_scenarios_have_the_order_of_the_model(scenario):
    assert arrival_order(scenario, 0, 0) is None


@pytest.mark.parametrize("order", [None, [2, 0, 3, 1]])
def test_gradients_arrive_in_that_order(order):
    probe = Probe(STRATEGY.params[:4], 0.0, 0)
    probe.arrival = order
    arrived = []
    for index, parameter in enumerate(probe.tensors):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived.append(index))
    probe([torch.ones(spec.shape) for spec in probe.params]).backward()
    assert arrived == (order or [3, 2, 1, 0])
