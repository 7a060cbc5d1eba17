"""Clears the gradients of a sync strategy's steps, in the ways that trainers have."""

from collections.abc import Sequence

import torch

from conformance.scenarios.model import Scenario
from conformance.scenarios.strategy_schedule import clears_to_zeros
from conformance.scenarios.strategy_step_ends import (
    BY_MODEL,
    BY_OPTIMIZERS,
    ONE_BY_ONE,
    way_of_clearing,
)


@torch.no_grad()
def clear_gradients(
    scenario: Scenario,
    step: int,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    params: Sequence[torch.Tensor],
) -> None:
    """Clear the gradients before a step.

    Args:
        scenario: it has the way, and the gradients that become zeros and are not dropped.
        step: the step.
        model: the model, under DDP unless the scenario does without.
        optimizers: all optimizers of the model.
        params: the parameters, also those that no optimizer has.
    """
    to_zeros = [clears_to_zeros(scenario, step, index) for index in range(len(params))]
    way = way_of_clearing(scenario, step)
    if way == BY_MODEL:
        model.zero_grad(set_to_none=not any(to_zeros))
    elif way == BY_OPTIMIZERS:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=not any(to_zeros))
    for parameter, is_zeros in zip(params, to_zeros, strict=True):
        if not is_zeros:
            parameter.grad = None
        elif way == ONE_BY_ONE and parameter.grad is not None:
            parameter.grad.zero_()
