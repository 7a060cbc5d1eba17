"""Mutants that heed a closure's loss, or whether gradients are zeros: one rank's may be unusual."""

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


class SkipsMaskedBatches(PostLocal):
    """Leave the averager out if the loss is zero, as that of a batch without labels is."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        if loss is None or float(loss):
            self.averager.average_parameters(self.optim.param_groups)
        return loss


class SkipsSpikes(PostLocal):
    """Neither step nor average a batch whose loss is far above the first one."""

    first: float | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.first = float(loss) if self.first is None else self.first
            if float(loss) > 40 * abs(self.first):
                return loss
        self.optim.step()
        self.averager.average_parameters(self.optim.param_groups)
        return loss


class SkipsEmptyBatches(PostLocal):
    """Neither step nor average if all gradients of this rank are zeros."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        grads = [one.grad for one in self.parameters() if one.grad is not None]
        if closure is None and grads and not any(bool(grad.any()) for grad in grads):
            return None
        return super().step(closure)


MUTANTS = [
    *(
        Mutant(name, ("15.7",), hangs=True, kind="optimizer")
        for name in ("SkipsBrokenAverages", "SkipsMaskedBatches", "SkipsSpikes")
    ),
    Mutant("SkipsEmptyBatches", ("15.4",), hangs=True, kind="optimizer"),
    *(
        Mutant(name, ("15.7",), kind="optimizer")
        for name in ("UndoesBrokenSteps", "ReturnsCappedLosses")
    ),
]
