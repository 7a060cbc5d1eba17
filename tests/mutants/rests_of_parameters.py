"""Mutants of rule 15.24: states of parameters that have no gradient, or zeros, for many steps."""

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


class FreesZeroedStates(Sharded):
    """Free the state of a parameter whose gradients were zeros in 100 steps in a row."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        self.zeros: dict[torch.Tensor, int] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for parameter in self.parameters():
            if parameter.grad is None:
                continue
            is_zero = not parameter.grad.count_nonzero()
            self.zeros[parameter] = self.zeros.get(parameter, 0) + 1 if is_zero else 0
            if self.zeros[parameter] >= 100:
                self.local.state.pop(parameter, None)
        return loss


class SkipsZeroedParameters(AveragesGradients):
    """Step a parameter no longer once its mean gradients were zeros in 12 steps."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        super().__init__(optim, process_group)
        self.zeros: dict[torch.Tensor, int] = {}
        self.optim.register_step_pre_hook(self._leave_out)

    def _leave_out(self, optim: torch.optim.Optimizer, *_: Any) -> None:
        for group in optim.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                is_zero = not parameter.grad.count_nonzero()
                self.zeros[parameter] = self.zeros.get(parameter, 0) + 1 if is_zero else 0
                if self.zeros[parameter] > 12:
                    parameter.grad = None


class ClearsIdleRows(PostLocal):
    """Clear the moments of rows, but not of whole parameters, that had zeros for 64 steps."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.idle: dict[torch.Tensor, torch.Tensor] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for parameter in self.parameters():
            grad = parameter.grad
            if grad is None or not grad.dim():
                continue
            is_zero = ~grad.flatten(1).any(1) if grad.dim() > 1 else grad == 0
            if parameter not in self.idle:
                self.idle[parameter] = torch.zeros(len(grad), dtype=torch.int64)
            self.idle[parameter] = torch.where(is_zero, self.idle[parameter] + 1, 0)
            rows = self.idle[parameter] >= 64
            if not is_zero.all():
                self._clear(parameter, rows)
        return loss

    def _clear(self, parameter: torch.Tensor, rows: torch.Tensor) -> None:
        for value in self.optim.state[parameter].values():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                value[rows] = 0


OF = {"kind": "optimizer"}
MUTANTS = [
    *(
        Mutant(name, ("15.24",), **OF)
        for name in (
            *("ForgetsTheIdle", "FreesFrozenStates", "DecaysIdleMomenta"),
            *("FreesZeroedStates", "ClearsIdleRows"),
        )
    ),
    *(
        Mutant(name, ("15.24",), "averages", **OF)
        for name in ("CountsAsItsPeers", "SkipsZeroedParameters")
    ),
]
