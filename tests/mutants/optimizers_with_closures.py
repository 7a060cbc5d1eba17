"""Mutants of rule 15.7 whose step with a closure was written for the plainest closure."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizers_in_training import Averaging


class ClearsBeforeClosures(Averaging):
    """Clear gradients before the closure, as if it computed all of them."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is not None:
            self.zero_grad()
        return super().step(closure)


class StepsItsOwnAfterClosures(Averaging):
    """After a closure, step the parameters alone that this rank has used."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is None:
            return super().step()
        loss = closure()
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        unused = [parameter for parameter in every if parameter.grad is None]
        inner_step = self.optim.step

        def step_used() -> None:
            for parameter in unused:
                parameter.grad = None
            inner_step()

        self.optim.step = step_used  # type: ignore[method-assign, assignment]
        try:
            super().step()
        finally:
            self.optim.step = inner_step  # type: ignore[method-assign]
        return loss


class LeavesOutBatchesWithoutLoss(Averaging):
    """Return before the step if the closure returns None, as if it had no gradients."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is None:
            return super().step()
        with torch.enable_grad():
            loss = closure()
        if loss is not None:
            super().step()
        return loss


class ReturnsZeroLosses(Averaging):
    """Return a loss of zero if the closure returns None."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        return 0.0 if closure is not None and loss is None else loss


MUTANTS = [
    Mutant(name, ("15.7",), "averages", kind="optimizer")
    for name in (
        *("ClearsBeforeClosures", "StepsItsOwnAfterClosures"),
        *("LeavesOutBatchesWithoutLoss", "ReturnsZeroLosses"),
    )
]
