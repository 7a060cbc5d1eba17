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


RIGHT = [Right("ReadsListsTwice", "averages", kind="optimizer")]
