"""Mutants of rules 15.24 and 15.35: groups without a parameter, or without any gradient."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.right.optimizer_wrappers import AveragesGradients, average_gradients


class StopsAtEmptyGroups(AveragesGradients):
    """Leave the loop over the groups at one without a parameter, as by break for continue."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if self.is_left_out(group):
                break
            average_gradients([group], self.group, self._divided)
        self.optim.step()
        return loss

    def is_left_out(self, group: dict[str, Any]) -> bool:
        return not group["params"]


class StopsAtFrozenGroups(StopsAtEmptyGroups):
    """Leave the loop over the groups at one that is frozen as a whole."""

    def is_left_out(self, group: dict[str, Any]) -> bool:
        params = group["params"]
        return bool(params) and not any(parameter.requires_grad for parameter in params)


class StopsAtGroupsWithoutGradients(StopsAtEmptyGroups):
    """Leave the loop over the groups at one that is trained, and has no gradient on any rank."""

    def is_left_out(self, group: dict[str, Any]) -> bool:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        users = torch.tensor(sum(parameter.grad is not None for parameter in trained))
        dist.all_reduce(users, group=self.group)
        return bool(trained) and not users


class NeedsSomeGradient(AveragesGradients):
    """Raise an error in a step in which no rank has a gradient."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        users = torch.tensor(sum(parameter.grad is not None for parameter in every))
        dist.all_reduce(users, group=self.group)
        if closure is None and not users:
            raise ValueError("stack expects a non-empty list of tensors")
        return super().step(closure)


MUTANTS = [
    Mutant("StopsAtEmptyGroups", ("15.35",), "averages", kind="optimizer"),
    *(
        Mutant(name, ("15.24",), "averages", kind="optimizer")
        for name in ("StopsAtFrozenGroups", "StopsAtGroupsWithoutGradients", "NeedsSomeGradient")
    ),
]
