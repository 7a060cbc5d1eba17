"""Mutants of rules 15.5 and 15.24: ``zero_grad()`` misses parameters that were added, thawed or
frozen."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded
from tests.right.optimizer_wrappers import AveragesGradients


def clear(parameters: list[torch.Tensor], set_to_none: bool) -> None:
    """Clear the gradients of some parameters."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


class ClearsGroupsOfTheStart(Sharded):
    """Clear the parameters that the optimizer was made with, and none of an added group."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        self.first = self.parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        clear(self.first, set_to_none)


class ClearsTrainedAtFirst(PostLocal):
    """Clear the parameters that required a gradient when their group was made."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.trained = [one for one in self.parameters() if one.requires_grad]

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        added = self.optim.param_groups[-1]["params"]
        self.trained += [one for one in added if one.requires_grad]

    def zero_grad(self, set_to_none: bool = True) -> None:
        clear(self.trained, set_to_none)


class ClearsTrainedNow(AveragesGradients):
    """Clear the parameters that require a gradient now: a frozen one is stepped on and on."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        every = [one for group in self.param_groups for one in group["params"]]
        clear([one for one in every if one.requires_grad], set_to_none)


OF = {"kind": "optimizer"}
MUTANTS = [
    Mutant("ClearsGroupsOfTheStart", ("15.5",), **OF),
    Mutant("ClearsTrainedAtFirst", ("15.24",), **OF),
    Mutant("ClearsTrainedNow", ("15.24",), "averages", **OF),
]
