"""Mutants of rules 15.24 and 15.35: groups without a parameter, or without any gradient, and
parameters whose gradients begin on one rank alone."""

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


class FirstRankDecides(AveragesGradients):
    """Agree on the parameters with gradients in 16 steps, and later if those of one rank change."""

    place = 0

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        super().__init__(optim, process_group)
        self.count = 0
        self.own: list[bool] = []
        self.used: dict[torch.Tensor, bool] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.has_to_agree([parameter.grad is not None for parameter in every]):
            users = torch.tensor(self.own).int()
            dist.all_reduce(users, group=self.group)
            self.used = dict(zip(every, map(bool, users.tolist()), strict=True))
        for parameter, is_used in self.used.items():
            if is_used:
                self.average(parameter)
        self.optim.step()
        return loss

    def has_to_agree(self, own: list[bool]) -> bool:
        self.count += 1
        changed = torch.tensor(int(own != self.own))
        source = dist.get_process_group_ranks(self.group)[self.place]
        dist.broadcast(changed, source, group=self.group)
        if self.count > 16 and not changed:
            return False
        self.own = own
        return True

    def average(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mean = self._divided(parameter.grad.contiguous())
        dist.all_reduce(mean, group=self.group)
        parameter.grad.copy_(mean)


class LastRankDecides(FirstRankDecides):
    """The same with the group's last rank in place of the first."""

    place = -1


MUTANTS = [
    Mutant("StopsAtEmptyGroups", ("15.35",), "averages", kind="optimizer"),
    *(
        Mutant(name, ("15.24",), "averages", kind="optimizer")
        for name in (
            *("StopsAtFrozenGroups", "StopsAtGroupsWithoutGradients", "NeedsSomeGradient"),
            *("FirstRankDecides", "LastRankDecides"),
        )
    ),
]
