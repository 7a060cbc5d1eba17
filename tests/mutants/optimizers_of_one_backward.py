"""Mutants of rule 15.27, two optimizers whose models get their gradients before one of them steps,
and of rule 15.43, a backward that has another one inside, or that raises an error."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tests.mutants import Mutant
from tests.right.optimizer_wrappers import AveragesInBackward, KeepsInBuffers


class QueuesOneCallback(AveragesInBackward):
    """Queue one callback in each backward: the mark is the class's, and one optimizer averages."""

    in_backward = False

    def _arrives(self, parameter: torch.Tensor) -> None:
        # A rank without a callback of its own does not average once more in the step.
        self.is_averaged = True
        if not QueuesOneCallback.in_backward:
            QueuesOneCallback.in_backward = True
            super()._arrives(parameter)

    def _average(self) -> None:
        QueuesOneCallback.in_backward = False
        super()._average()


class SharesBuffers(KeepsInBuffers):
    """Keep gradients in buffers that all optimizers share: by shapes and places in the groups."""

    shared: ClassVar[dict[Any, torch.Tensor]] = {}

    def _take(self, parameter: torch.Tensor) -> None:
        every = [one for group in self.param_groups for one in group["params"]]
        place = next(place for place, one in enumerate(every) if one is parameter)
        grad = parameter.grad
        assert grad is not None
        key = (place, parameter.shape, parameter.dtype)
        buffer = SharesBuffers.shared.setdefault(key, grad.clone())
        if grad is not buffer:
            parameter.grad = buffer.copy_(grad)


class AveragesOnce(AveragesInBackward):
    """Queue one callback before a step, although a reentrant checkpoint ends before the backward; a
    second backward is an error.
    """

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.arrived: set[torch.Tensor] = set()
        super().__init__(optim, process_group)

    def _arrives(self, parameter: torch.Tensor) -> None:
        if parameter in self.arrived:
            raise RuntimeError("a second backward before step()")
        self.arrived.add(parameter)
        super()._arrives(parameter)

    def _average(self) -> None:
        super()._average()
        self.is_queued = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.arrived.clear()
        self.is_queued = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.arrived.clear()
        self.is_queued = False
        super().zero_grad(set_to_none)


class TrustsTheEnd(AveragesInBackward):
    """Average in the step of a rank without a backward alone: a backward that raises an error never
    takes back the mark that its end is queued.
    """

    has_arrived = False

    def _arrives(self, parameter: torch.Tensor) -> None:
        self.has_arrived = True
        super()._arrives(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.is_averaged = self.has_arrived
        super().step()
        self.has_arrived = False
        return loss


OF = {"kind": "optimizer"}
MUTANTS = [
    *(
        Mutant(name, ("15.27",), "averages", **OF)
        for name in ("QueuesOneCallback", "SharesBuffers")
    ),
    *(Mutant(name, ("15.43",), "averages", **OF) for name in ("AveragesOnce", "TrustsTheEnd")),
]
