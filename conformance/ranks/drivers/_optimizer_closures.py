"""The steps of an optimizer wrapper that have a closure."""

import builtins
from typing import Any, Protocol

import torch

from conformance.ranks.drivers._optimizer_calls import WaysToCall
from conformance.ranks.drivers._optimizer_clearing import Training as Cleared
from conformance.ranks.drivers._optimizer_clearing import clear_before
from conformance.ranks.models.probe import Probe
from conformance.scenarios.closure_losses import loss_of
from conformance.scenarios.optimizer_closures import comes_in_parts


class Training(Cleared, Protocol):
    """The parts of the driver of optimizers that a step with a closure needs."""

    ways: WaysToCall
    model: Probe
    group_rank: int
    size: int

    def inside(self, call: str) -> Any: ...

    def gradients(self, step: int) -> list[torch.Tensor | None]: ...


def skip_batch(driver: Training, name: str) -> None:
    """Step with a closure that raises an exception of Python's, and go on after it."""
    raised = getattr(builtins, name)("this batch failed")
    caught: BaseException | None = None

    def closure() -> torch.Tensor:
        raise raised

    with driver.inside("step"):
        try:
            driver.ways.step(driver.optimizer, closure)
        except BaseException as error:
            caught = error
    text = "nothing" if caught is None else f"{type(caught).__name__}: {str(caught)[:200]}"
    driver.recorder.event("failed", same=caught is raised, came=text)


def step_with_closure(driver: Training, step: int) -> None:
    """Step with a closure that computes the gradients, or the second half of them."""
    calls: list[bool] = []
    in_parts = comes_in_parts(driver.scenario, step)

    def gradients() -> list[torch.Tensor | None]:
        share = 0.5 if in_parts else 1.0
        return [None if grad is None else grad * share for grad in driver.gradients(step)]

    if in_parts:
        clear_before(driver, step)
        with driver.doing("backward"):
            driver.model(gradients()).backward()

    def closure() -> torch.Tensor | None:
        calls.append(torch.is_grad_enabled())
        with torch.enable_grad():
            if not in_parts:
                clear_before(driver, step)
            value = loss_of(driver.scenario, step, driver.group_rank, driver.size)
            loss: torch.Tensor = driver.model(gradients()) + (value or 0.0)
            loss.backward()
        return None if value is None else loss

    with driver.inside("step"):
        loss = driver.ways.step(driver.optimizer, closure)
    value = float(loss) if isinstance(loss, (torch.Tensor, float, int)) else None
    driver.recorder.event("closure", calls=calls, loss=value)
