"""Mutants of rule 15.27: two optimizers whose models get their gradients before one of them
steps."""

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


OF = {"kind": "optimizer"}
MUTANTS = [
    Mutant(name, ("15.27",), "averages", **OF) for name in ("QueuesOneCallback", "SharesBuffers")
]
