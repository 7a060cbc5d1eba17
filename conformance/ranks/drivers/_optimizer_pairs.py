"""Leaves gradients on the parameters of two models, before either of their optimizers steps."""

from typing import Any, Protocol

import torch

from conformance.ranks.drivers._optimizer_clearing import Training as Cleared
from conformance.ranks.drivers._optimizer_clearing import clear_before
from conformance.ranks.models.probe import Probe
from conformance.scenarios.optimizer_pairs import Pair, pair_of
from conformance.scenarios.optimizer_training import averages_gradients


class Trainings(Cleared, Protocol):
    """The parts of the driver of optimizers that a pair of steps needs."""

    model: Probe

    def take_turn(self, step: int) -> None: ...

    def backward(self, step: int) -> None: ...

    def gradients(self, step: int) -> list[torch.Tensor | None]: ...


def leave_gradients(driver: Trainings, step: int) -> None:
    """Leave the gradients of a step on the parameters, and those of the other step of its pair.

    The second step of a pair has its gradients already.
    """
    pair = pair_of(driver.scenario, step)
    if pair is None:
        driver.backward(step)
    elif step == pair.first:
        _leave_both(driver, pair)
        driver.take_turn(step)


def _leave_both(driver: Trainings, pair: Pair) -> None:
    # Subjects that average no gradients are given them without a backward.
    is_joint = pair.is_joint and averages_gradients(driver.scenario)
    losses: list[Any] = []
    for step in pair.backwards:
        driver.take_turn(step)
        if is_joint:
            clear_before(driver, step)
            losses.append(driver.model(driver.gradients(step)))
        else:
            driver.backward(step)
    if losses:
        with driver.doing("backward"):
            torch.stack(losses).sum().backward()
