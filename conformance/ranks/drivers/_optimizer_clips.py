"""Calls ``clip_grad_norm()`` of an optimizer wrapper before its steps, as trainers do."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from conformance.records.recorder import Recorder
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_clipping import CLIPPED, METHODS, share_of_norm


class Training(Protocol):
    """The parts of the driver of optimizers that a call needs."""

    scenario: Scenario
    optimizer: Any
    recorder: Recorder

    def inside(self, call: str) -> Any: ...

    def gradients(self, step: int) -> list[torch.Tensor | None]: ...


def clip_by_norm(driver: Training, step: int) -> None:
    """Have the optimizer clip its gradients, if it can, and if the scenario has that in the step.

    The largest norm is a share of the norm of this rank's gradients.
    """
    if driver.scenario.variant != CLIPPED.variant:
        return
    methods = _methods(driver.optimizer)
    if not methods:
        driver.recorder.event("clips_not")
        return
    share = share_of_norm(driver.scenario, step)
    if share is None:
        return
    squares = [grad.double().square().sum() for grad in driver.gradients(step) if grad is not None]
    max_norm = share * float(torch.stack(squares).sum().sqrt())
    # If an optimizer has both methods, it may be called by either.
    name, method = methods[step % len(methods)]
    with driver.inside(name):
        returned = method(max_norm)
    driver.recorder.event("clipped", method=name, max_norm=max_norm, returned=_number(returned))


def _methods(optimizer: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Return the methods that take a norm, and require nothing else, by their names."""
    methods = [(name, getattr(optimizer, name, None)) for name in METHODS]
    return [(name, method) for name, method in methods if callable(method) and _takes_norm(method)]


def _takes_norm(method: Callable[..., Any]) -> bool:
    """Whether a method takes a norm as its first argument, and requires no other."""
    try:
        signature = inspect.signature(method)
        signature.bind(1.0)
    except (TypeError, ValueError):
        return False
    first = next(iter(signature.parameters.values()))
    return first.kind is first.VAR_POSITIONAL or "norm" in first.name


def _number(returned: Any) -> float | None:
    """Return the number that a call has returned, or None if it is none."""
    if isinstance(returned, torch.Tensor):
        return float(returned) if returned.numel() == 1 and returned.is_floating_point() else None
    return returned if isinstance(returned, float) else None
