"""Mutants of rule 15.43: gradients of another dtype than their weights, and backwards that come
after ``synchronize()``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.right.optimizer_wrappers import AveragesGradients, average_gradients


class _Changes(AveragesGradients):
    """Change gradients before and after their average."""

    def before(self, parameter: torch.Tensor) -> None:
        """Change a rank's own gradient."""

    def after(self, parameter: torch.Tensor) -> None:
        """Change a mean."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._change(self.before)
            average_gradients(self.param_groups, self.group, self._divided)
            self._change(self.after)
        self.optim.step()
        return loss

    def _change(self, change: Callable[[torch.Tensor], None]) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change(parameter)


class RoundsLargeGradients(_Changes):
    """Round gradients to the dtype of their weight before the average, if it has 64 elements."""

    def before(self, parameter: torch.Tensor) -> None:
        if parameter.numel() >= 64 and parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.to(parameter.dtype))


class RoundsUndeclared(_Changes):
    """Round gradients to the dtype of their weight before the average, if it has no grad_dtype."""

    def before(self, parameter: torch.Tensor) -> None:
        declared = getattr(parameter, "grad_dtype", parameter.dtype) or parameter.dtype
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.to(declared))


class FlushesTinyMeans(_Changes):
    """Take means below the normal numbers of the weight's dtype for zeros."""

    def after(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if grad is not None:
            grad[grad.abs() < torch.finfo(parameter.dtype).smallest_normal] = 0


class BoundsMeans(_Changes):
    """Limit means to the range of the weight's dtype."""

    def after(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if grad is not None:
            largest = torch.finfo(parameter.dtype).max
            grad.copy_(torch.where(grad.isfinite(), grad.clamp(-largest, largest), grad))


class _Synchronizes(AveragesGradients):
    """Average in ``synchronize()``, and in step() unless that is skipped: right."""

    skips = False

    def synchronize(self) -> None:
        average_gradients(self.param_groups, self.group, self._divided)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self.skips = True
        try:
            yield
        finally:
            self.skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.skips:
            self.before_step()
        self.optim.step()
        self.end_step()
        return loss

    def before_step(self) -> None:
        average_gradients(self.param_groups, self.group, self._divided)

    def end_step(self) -> None:
        """Forget what was synchronized."""

    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for group in self.param_groups for parameter in group["params"]]


class SkipsKnownTensors(_Synchronizes):
    """Average nothing in step() if synchronize() has averaged the tensors of all gradients."""

    averaged: list[torch.Tensor | None] | None = None

    def synchronize(self) -> None:
        super().synchronize()
        self.averaged = self.gradients()

    def before_step(self) -> None:
        known = self.averaged or [None]
        is_known = all(a is b for a, b in zip(known, self.gradients(), strict=False))
        anything_new = torch.tensor(not is_known or self.averaged is None).int()
        dist.all_reduce(anything_new, group=self.group)
        if anything_new:
            super().before_step()

    def end_step(self) -> None:
        self.averaged = None


class SynchronizesOnce(SkipsKnownTensors):
    """Average nothing in a second synchronize() before a step, if no gradient was replaced."""

    def synchronize(self) -> None:
        SkipsKnownTensors.before_step(self)
        self.averaged = self.gradients()

    def before_step(self) -> None:
        _Synchronizes.before_step(self)


class SumsLaterGradients(_Synchronizes):
    """Add up, over ranks, what backwards have added after synchronize(), and divide it by none."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        super().__init__(optim, process_group)
        self.means: list[Any] = []

    def synchronize(self) -> None:
        super().synchronize()
        self.means = [(grad, None if grad is None else grad.clone()) for grad in self.gradients()]

    def before_step(self) -> None:
        means = dict(self._means_of_known())
        parameters = [p for group in self.param_groups for p in group["params"]]
        others = [p for p in parameters if p not in means]
        average_gradients([{"params": others}], self.group, self._divided)
        for parameter, mean in means.items():
            added = parameter.grad - mean
            dist.all_reduce(added, group=self.group)
            parameter.grad.copy_(mean + added)

    def _means_of_known(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, (known, mean) in zip(parameters, self.means, strict=False):
            if mean is not None and parameter.grad is known:
                yield parameter, mean

    def end_step(self) -> None:
        self.means.clear()


MUTANTS = [
    Mutant(name, ("15.43",), "averages", kind="optimizer")
    for name in (
        *("RoundsLargeGradients", "RoundsUndeclared", "FlushesTinyMeans", "BoundsMeans"),
        *("SkipsKnownTensors", "SynchronizesOnce", "SumsLaterGradients"),
    )
]
