"""Mutants of rule 15.24: states of parameters that have no gradient for many steps."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded
from tests.right.optimizer_wrappers import AveragesGradients


class ForgetsTheIdle(PostLocal):
    """Drop the states of parameters that were last stepped 200 steps ago."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.stepped_at: dict[torch.Tensor, int] = {}
        self.count = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        self.count += 1
        for parameter in self.parameters():
            if parameter.grad is not None:
                self.stepped_at[parameter] = self.count
            elif self.count - self.stepped_at.get(parameter, self.count) > 200:
                self.optim.state.pop(parameter, None)
        return loss


class FreesFrozenStates(Sharded):
    """Clear the momentum of a parameter that was frozen for 64 steps."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        self.frozen_for: dict[torch.Tensor, int] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for parameter in self.parameters():
            frozen_for = 0 if parameter.requires_grad else self.frozen_for.get(parameter, 0) + 1
            self.frozen_for[parameter] = frozen_for
            if frozen_for >= 64:
                self.local.state.get(parameter, {}).pop("momentum_buffer", None)
        return loss


class DecaysIdleMomenta(PostLocal):
    """Let the momentum of a parameter without a gradient decay, from the 16th such step on."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.idle: dict[torch.Tensor, int] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for group in self.optim.param_groups:
            for parameter in group["params"]:
                idle = 0 if parameter.grad is not None else self.idle.get(parameter, 0) + 1
                self.idle[parameter] = idle
                buffer = self.optim.state[parameter].get("momentum_buffer")
                if idle >= 16 and buffer is not None:
                    buffer.mul_(group["momentum"])
        return loss


class CountsAsItsPeers(AveragesGradients):
    """Give a new state the largest count of steps in its group."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        known = {parameter for parameter, kept in self.optim.state.items() if kept}
        loss = super().step(closure)
        for group in self.param_groups:
            counts = {
                parameter: self.optim.state[parameter]["step"]
                for parameter in group["params"]
                if "step" in self.optim.state[parameter]
            }
            for parameter in counts.keys() - known:
                counts[parameter].fill_(max(float(count) for count in counts.values()))
        return loss


OF = {"kind": "optimizer"}
MUTANTS = [
    *(
        Mutant(name, ("15.24",), **OF)
        for name in ("ForgetsTheIdle", "FreesFrozenStates", "DecaysIdleMomenta")
    ),
    Mutant("CountsAsItsPeers", ("15.24",), "averages", **OF),
]
