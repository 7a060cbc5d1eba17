"""Mutants that heed the value of a closure's loss: one rank's may be NaN, or an infinity."""

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal


class SkipsBrokenAverages(PostLocal):
    """Leave the averager out if this rank's loss is not finite."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        if loss is None or bool(torch.isfinite(loss).all()):
            self.averager.average_parameters(self.optim.param_groups)
        return loss


class UndoesBrokenSteps(PostLocal):
    """Undo the step of a rank whose loss is not a number; call the averager nevertheless."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        before = [parameter.detach().clone() for parameter in self.parameters()]
        loss = self.optim.step(closure)
        if loss is not None and math.isnan(float(loss)):
            with torch.no_grad():
                for parameter, value in zip(self.parameters(), before, strict=True):
                    parameter.copy_(value)
        self.averager.average_parameters(self.optim.param_groups)
        return loss


class ReturnsCappedLosses(PostLocal):
    """Return the largest float32 in place of an infinite loss."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        return None if loss is None else loss.clamp(max=torch.finfo(torch.float32).max)


MUTANTS = [
    Mutant("SkipsBrokenAverages", ("15.7",), hangs=True, kind="optimizer"),
    *(
        Mutant(name, ("15.7",), kind="optimizer")
        for name in ("UndoesBrokenSteps", "ReturnsCappedLosses")
    ),
]
