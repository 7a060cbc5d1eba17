"""The backwards before a step of an optimizer wrapper that averages gradients."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from conformance.ranks.models.probe import Probe
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_backwards import DROPPED, discards, shares


class Training(Protocol):
    """The parts of the driver of optimizers that a backward needs."""

    scenario: Scenario
    model: Probe
    params: list[torch.nn.Parameter]
    optimizer: Any

    def doing(self, activity: str) -> Any: ...

    def values(self, kind: str, step: int, index: int, rank: int | None = None) -> torch.Tensor: ...


def run_backwards(driver: Training, step: int, grads: Sequence[torch.Tensor | None]) -> None:
    """Leave the gradients of a step on the parameters, by one backward or several.

    Args:
        driver: the driver, with the model and the optimizer.
        step: the number of the step.
        grads: the gradients, None for a parameter that has none.
    """
    scenario = driver.scenario
    if discards(scenario, step):
        _drop_gradients(driver, step)
    parts = [shares(scenario, step, index) for index in range(len(grads))]
    for of_backward in zip(*parts, strict=True):
        some = [
            None if grad is None or not share else grad * share
            for grad, share in zip(grads, of_backward, strict=True)
        ]
        if any(grad is not None for grad in some):
            with driver.doing("backward"):
                driver.model(some).backward()


def _drop_gradients(driver: Training, step: int) -> None:
    """Run a backward whose step is given up: the optimizer drops its gradients."""
    specs = driver.scenario.params
    dropped: list[torch.Tensor | None] = [
        lay_out(driver.values("crafted", DROPPED + step, index), spec.layout)
        for index, spec in enumerate(specs)
    ]
    with driver.doing("backward"):
        driver.model(dropped).backward()
    with driver.doing("zero_grad"):
        driver.optimizer.zero_grad()
    for parameter in driver.params:
        # Zeros are as good as none (15.8), but a parameter with zeros is stepped.
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None
