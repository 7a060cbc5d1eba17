"""Mutants of rule 15.43: batches that are given up after synchronize(), and gradients that are
changed after a backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.optimizer_backwards import CopiesInHooks
from tests.right.optimizer_wrappers import (
    AveragesGradients,
    KeepsInBuffers,
    SynchronizesAnew,
    average_gradients,
)


class MarksParameters(SynchronizesAnew):
    """Mark the parameters whose gradients are averaged, until its step() or its zero_grad()."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.marked: set[torch.Tensor] = set()
        super().__init__(optim, process_group)

    def synchronize(self) -> None:
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        left = [parameter for parameter in every if parameter not in self.marked]
        average_gradients([{"params": left}], self.group, self._divided)
        self.marked.update(left)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.marked.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.marked.clear()
        super().zero_grad(set_to_none)


class SkipsTheNextStep(SynchronizesAnew):
    """Let the step after a synchronize() average nothing, whichever batch it is of."""

    skips_next = False

    def synchronize(self) -> None:
        super().synchronize()
        self.skips_next = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        self.skips = self.skips or (self.skips_next and closure is None)
        loss = super().step(closure)
        self.skips = False
        self.skips_next = False
        return loss


class SkipsUntilTheStep(SynchronizesAnew):
    """End skip_synchronize() with the step in it: if there is none, the next step averages none."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self.skips = True
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.skips = False
        return loss


class OnlySynchronizes(AveragesGradients):
    """Average in synchronize(), or else in step(), which takes an earlier batch's for its own."""

    is_averaged = False

    def synchronize(self) -> None:
        if not self.is_averaged:
            average_gradients(self.param_groups, self.group, self._divided)
        self.is_averaged = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        self.is_averaged = False
        self.optim.step()
        return loss


class AveragesItsBuffers(KeepsInBuffers):
    """Average the buffers that hooks have filled, also if ``p.grad`` is another tensor by now."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, buffer in self.buffers.items():
            if parameter.grad is not None:
                parameter.grad = buffer
        super().step()
        return loss


class AddsVersions(CopiesInHooks):
    """Average copies, unless the versions of all gradients together have changed since then."""

    versions = 0

    def arrives(self, parameter: torch.Tensor) -> None:
        super().arrives(parameter)
        self.versions = self.count()

    def count(self) -> int:
        """Return the sum of the versions of all gradients."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        return sum(parameter.grad._version + 1 for parameter in every if parameter.grad is not None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        changed = torch.tensor(int(self.count() != self.versions))
        dist.all_reduce(changed, dist.ReduceOp.MAX, self.group)
        if changed:
            self.copies.clear()
        super().step()
        return loss


OF = {"kind": "optimizer"}
UNSCALED = {"15.38": "a GradScaler changes no version of a gradient either"}
MUTANTS = [
    *(
        Mutant(name, ("15.43",), "averages", **OF)
        for name in (
            *("MarksParameters", "SkipsTheNextStep", "SkipsUntilTheStep", "OnlySynchronizes"),
            "AveragesItsBuffers",
        )
    ),
    Mutant("AddsVersions", ("15.43",), "averages", because=UNSCALED, **OF),
]
