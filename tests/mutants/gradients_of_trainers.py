"""Mutants of rules 15.24 and 15.43: gradients that no backward has accumulated, and parameters that
are frozen between a backward and its step.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_backwards import _Hooked
from tests.mutants.optimizer_wrappers import PostLocal
from tests.right.optimizer_wrappers import AveragesGradients, average_gradients


class _AveragesSome(AveragesGradients):
    """Leave this rank's own gradients to some parameters; collectives are those of all."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = {
            parameter: parameter.grad.clone()
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and not self.is_averaged(parameter)
        }
        average_gradients(self.param_groups, self.group, self._divided)
        for parameter, grad in own.items():
            parameter.grad.copy_(grad)
        self.optim.step()
        self.after_step()
        return loss

    def is_averaged(self, parameter: torch.Tensor) -> bool:
        raise NotImplementedError

    def after_step(self) -> None:
        """Take note of the gradients of this step."""


class AveragesNewVersions(_AveragesSome):
    """Take a gradient for averaged if it is that of the last step in its version, which a write to
    ``p.grad.data`` leaves as it was.
    """

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.latest: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        super().__init__(optim, process_group)

    def is_averaged(self, parameter: torch.Tensor) -> bool:
        if parameter not in self.latest:
            return True
        grad, version = self.latest[parameter]
        return parameter.grad is not grad or grad._version != version

    def after_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if (grad := parameter.grad) is not None:
                    self.latest[parameter] = (grad, grad._version)


class AveragesAfterBackwards(_Hooked, _AveragesSome):
    """Average if a hook has seen any gradient since the last step: without a backward there should
    be none.
    """

    has_run = False

    def arrives(self, parameter: torch.Tensor) -> None:
        self.has_run = True

    def is_averaged(self, parameter: torch.Tensor) -> bool:
        return self.has_run

    def after_step(self) -> None:
        self.has_run = False


class AveragesArrivals(_Hooked, _AveragesSome):
    """Average the gradients that hooks have seen if they have seen some, and all otherwise."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.seen: set[torch.Tensor] = set()
        super().__init__(optim, process_group)

    def arrives(self, parameter: torch.Tensor) -> None:
        self.seen.add(parameter)

    def is_averaged(self, parameter: torch.Tensor) -> bool:
        has_hook = bool(parameter._post_accumulate_grad_hooks)
        return not self.seen or not has_hook or parameter in self.seen

    def after_step(self) -> None:
        self.seen.clear()


class LeavesLargeFrozenAlone(_AveragesSome):
    """Average the gradients of trainable parameters, and of small ones, which share one bucket."""

    def is_averaged(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad or parameter.numel() <= 16


class DropsFrozenGradients(AveragesGradients):
    """Drop the gradients of parameters that require none any more."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    parameter.grad = None
        return super().step(closure)


class StepsTheTrainable(PostLocal):
    """Put parameters back that are frozen at the step, with the average of the others."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        frozen = {p: p.detach().clone() for p in self.parameters() if not p.requires_grad}
        loss = self.optim.step(closure)
        with torch.no_grad():
            for parameter, value in frozen.items():
                parameter.copy_(value)
        self.averager.average_parameters(self.optim.param_groups)
        return loss


OF = {"kind": "optimizer"}
MUTANTS = [
    *(
        Mutant(name, ("15.43",), "averages", **OF)
        for name in ("AveragesNewVersions", "AveragesAfterBackwards", "AveragesArrivals")
    ),
    *(
        Mutant(name, ("15.24",), "averages", **OF)
        for name in ("LeavesLargeFrozenAlone", "DropsFrozenGradients")
    ),
    Mutant("StepsTheTrainable", ("15.24",), **OF),
]
