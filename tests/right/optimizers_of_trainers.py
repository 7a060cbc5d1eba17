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


RIGHT = [
    Right("ReadsListsTwice", "averages", kind="optimizer"),
    Right("HasFixedGroups", "averages", kind="optimizer"),
    Right("HasFewMethods", kind="optimizer"),
]
