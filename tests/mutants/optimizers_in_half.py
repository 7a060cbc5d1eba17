"""Mutants of optimizers whose code for weights in half precision has a defect of its own."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.right.optimizers_in_half import HALVES, InFloat32


class _OfHalves(InFloat32):
    @property
    def halves(self) -> list[torch.Tensor]:
        """The weights in half precision that are in a group."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        return [parameter for parameter in every if parameter.dtype in HALVES]


class TakesNoneForZeros(_OfHalves):
    """Step weights in half precision without a gradient by zeros, so that they decay."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self.halves:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().step()
        return loss


class CollectsBeforeClosures(_OfHalves):
    """Collect the gradients of weights in half precision before the closure computes them."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is None:
            return super().step()
        collected = [
            (parameter, None if parameter.grad is None else parameter.grad.clone())
            for parameter in self.halves
        ]
        with torch.enable_grad():
            loss = closure()
        for parameter, grad in collected:
            parameter.grad = grad
        super().step()
        return loss


class ClearsFirstHalves(_OfHalves):
    """zero_grad() clears those weights in half precision that its first call has found."""

    first: set[torch.Tensor] | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.first is None:
            self.first = set(self.halves)
        left = [(one, one.grad) for one in self.halves if one not in self.first]
        super().zero_grad(set_to_none)
        for parameter, grad in left:
            parameter.grad = grad


MUTANTS = [
    Mutant("TakesNoneForZeros", ("15.9",), "averages", kind="optimizer"),
    Mutant("CollectsBeforeClosures", ("15.7",), "averages", kind="optimizer"),
    Mutant("ClearsFirstHalves", ("15.5",), "averages", kind="optimizer"),
]
