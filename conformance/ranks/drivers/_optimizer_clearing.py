"""Clears the gradients of an optimizer wrapper's parameters, by hand or by ``zero_grad()``."""

from typing import Any, Protocol

import torch

from conformance.ranks.drivers._optimizer_use import gradients_left, takes_set_to_none
from conformance.records.recorder import Recorder
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import Setting
from conformance.scenarios.optimizer_clearing import Clearing, clearing_before


class Training(Protocol):
    """The parts of the driver of optimizers that are needed to clear gradients."""

    scenario: Scenario
    setting: Setting
    params: list[torch.nn.Parameter]
    optimizer: Any
    recorder: Recorder

    def doing(self, activity: str) -> Any: ...


def clear_before(driver: Training, step: int) -> None:
    """Clear gradients before the backward of a step, unless it was done after the last step."""
    way = clearing_before(driver.scenario, step)
    if way is Clearing.BY_TRAINER:
        for parameter in driver.params:
            parameter.grad = None
    elif way is Clearing.FIRST:
        _clear_by_optimizer(driver, step)


def clear_after(driver: Training, step: int) -> None:
    """Clear gradients after a step, if this is the way of the next one."""
    has_next = step + 1 < len(driver.scenario.steps)
    if has_next and clearing_before(driver.scenario, step + 1) is Clearing.LAST:
        _clear_by_optimizer(driver, step)


def _clear_by_optimizer(driver: Training, step: int) -> None:
    """Call ``zero_grad()``, and clear the parameters that are in no group yet."""
    with driver.doing("zero_grad"):
        driver.optimizer.zero_grad()
    outside = driver.setting.in_no_group(step)
    for index, parameter in enumerate(driver.params):
        # Zeros are as good as none (15.8), but a parameter with zeros is stepped.
        if parameter.grad is not None and (index in outside or not parameter.grad.any()):
            parameter.grad = None


def zero_gradients(driver: Training, step: int) -> None:
    """Call ``zero_grad()``, with zeros in every other step, and record the gradients that stay.

    If it has no parameter for zeros, it is called without.
    """
    takes_zeros = takes_set_to_none(driver.optimizer)
    keeps = bool(step % 2) and takes_zeros
    options = {"set_to_none": False} if keeps else {}
    with driver.doing("zero_grad"):
        driver.optimizer.zero_grad(**options)
    left = gradients_left(driver.params)
    driver.recorder.event("zeroed", keeps=keeps, takes_zeros=takes_zeros, **left)
