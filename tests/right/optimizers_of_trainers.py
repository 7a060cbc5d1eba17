"""Right optimizer wrappers in the shapes of trainers' own code."""

from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right.optimizer_wrappers import average_gradients


class ReadsListsTwice:
    """Average the gradients of the parameters in a list, which is read again after the optimizer.

    Parameters of a group that is added are appended to them.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter] | list[dict[str, Any]],
        optimizer_class: Any,
        process_group: Any,
        **options: Any,
    ) -> None:
        self.optim = optimizer_class(params, **options)
        self.group = process_group
        self.averaged: list[torch.nn.Parameter] = []
        for entry in params:
            given = entry["params"] if isinstance(entry, dict) else entry
            self.averaged += [given] if isinstance(given, torch.nn.Parameter) else given

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optim, name)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optim.add_param_group(group)
        self.averaged += self.optim.param_groups[-1]["params"]

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        size = dist.get_world_size(self.group)
        average_gradients([{"params": self.averaged}], self.group, lambda grad: grad / size)
        self.optim.step()
        return loss


class HasFixedGroups(ReadsListsTwice):
    """The same without add_param_group(), as wrappers with flat buffers of gradients."""

    add_param_group = None  # type: ignore[assignment]


class HasFewMethods:
    """Local SGD with the methods of fairseq's optimizers: no add_param_group(), and a zero_grad()
    without arguments.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        self.optim = optim
        self.averager = averager

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self, closure: Any = None) -> Any:
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def state_dict(self) -> list[Any]:
        return [self.optim.state_dict(), self.averager.step]

    def load_state_dict(self, state: list[Any]) -> None:
        self.optim.load_state_dict(state[0])
        self.averager.step = state[1]


class HasVelocities(torch.optim.Optimizer):
    """SGD whose ranks step, and send, a share of the parameters each. The collected state calls the
    momentum a velocity.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        process_group: Any = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.group = process_group
        self.collected: dict[int, dict[str, Any]] | None = None

    def _owner(self, number: int) -> int:
        return number % dist.get_world_size(self.group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(one, group) for group in self.param_groups for one in group["params"]]
        for number, (parameter, group) in enumerate(pairs):
            if parameter.grad is None:
                continue
            if self._owner(number) == dist.get_rank(self.group):
                update = parameter.grad + group["weight_decay"] * parameter
                if group["momentum"]:
                    state = self.state[parameter]
                    velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                    update = velocity.mul_(group["momentum"]).add_(update)
                parameter.sub_(group["lr"] * update)
            whole = parameter.detach().contiguous()
            # torch 2.4 and 2.5 have no group_src.
            owner = dist.get_global_rank(self.group, self._owner(number))
            dist.broadcast(whole, owner, group=self.group)
            parameter.copy_(whole)
        return loss

    def consolidate_state_dict(self, to: int = 0) -> None:
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, super().state_dict()["state"], group=self.group)
        self.collected = None
        if dist.get_rank(self.group) == to:
            self.collected = {number: one for part in parts for number, one in part.items()}

    def state_dict(self) -> dict[str, Any]:
        if self.collected is None:
            raise RuntimeError("consolidate_state_dict() has to be called before, on all ranks")
        return {**super().state_dict(), "state": self.collected}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rank = dist.get_rank(self.group)
        own = {at: one for at, one in state_dict["state"].items() if self._owner(at) == rank}
        super().load_state_dict({**state_dict, "state": own})
        self.collected = None


RIGHT = [
    Right("ReadsListsTwice", "averages", kind="optimizer"),
    Right("HasFixedGroups", "averages", kind="optimizer"),
    Right("HasFewMethods", kind="optimizer"),
    Right("HasVelocities", kind="optimizer"),
]
