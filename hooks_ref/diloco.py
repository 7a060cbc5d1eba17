"""DiLoCo: an outer optimizer with momentum takes the average of many local steps as one gradient.

With ``x_r`` the parameters of rank ``r``, ``G`` the group and ``a`` the parameters that all ranks
began a round with,

    at t = w             x_r <- a <- mean over G of x               the first round begins
    at t = w + p, ...    d <- a - mean over G of x
                         v <- m v + d
                         x_r <- a <- a - lr (d + m v)               Nesterov's momentum

with ``w`` warm-up steps, ``p`` local steps a round, and ``v`` zero at first. With ``lr = 1`` and
``m = 0`` it is periodic averaging. Inner optimizers keep their own state from round to round, as in
the paper.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv:2311.08105 (algorithm 1; lr = 0.7, m = 0.9 there).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hooks_ref._state import check_int, check_number
from hooks_ref.model_averaging import (
    Parameters,
    PeriodicModelAverager,
    average_parameters,
    trainable_parameters,
    used_parameters,
)


class DiLoCoModelAverager(PeriodicModelAverager):
    """Every ``period`` steps, takes one outer step from the round's first values to the mean.

    Keeps two tensors for each parameter, in the parameter's dtype, or in float32 for half
    precision: its value at the beginning of the round, and the momentum. They are stored by the
    parameter's place among the given parameters, so the order of parameters has to stay the same.

    Args:
        period: local steps of a round, at least 1.
        warmup_steps: steps before the first round, at least 0.
        process_group: the group to average over; None is the default group.
        lr: learning rate of the outer optimizer, at least 0.
        momentum: momentum of the outer optimizer, in [0, 1].

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        super().__init__(period, warmup_steps, process_group)
        self.lr = check_number("lr", lr, 0)
        self.momentum = check_number("momentum", momentum, 0, 1)
        self.begun: dict[int, torch.Tensor] = {}
        self.velocity: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def average_parameters(self, params: Parameters) -> None:
        if self.is_due():
            used = used_parameters(params, self.group)
            average_parameters(used.values(), self.group)
            for place, parameter in used.items():
                self._step(place, parameter)
        self.step += 1

    def _step(self, place: int, parameter: torch.Tensor) -> None:
        """Take the outer step of one parameter, which holds the mean, or begin its first round."""
        if place not in self.begun:
            self._begin(place, parameter)
            return
        begun = self.begun[place]
        velocity = self.velocity[place]
        difference = begun - parameter
        velocity.mul_(self.momentum).add_(difference)
        parameter.copy_(begun.sub_(difference.add_(velocity, alpha=self.momentum), alpha=self.lr))

    def _begin(self, place: int, parameter: torch.Tensor) -> None:
        """Begin the first round of one parameter with its value."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.begun[place] = parameter.detach().to(wide, copy=True)
        self.velocity[place] = torch.zeros_like(self.begun[place])

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "begun": _copies(self.begun),
            "velocity": _copies(self.velocity),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self.begun = _copies(saved["begun"])
        self.velocity = _copies(saved["velocity"])


class OuterStepModelAverager(DiLoCoModelAverager):
    """The same, with a first round that begins when the averager is made.

    All ranks hold the same parameters then, as after DDP has been made. The outer steps come at
    ``t = p - 1, 2 p - 1, ...``, so that each follows ``p`` local steps.

    Args:
        params: the parameters, or parameter groups; the same on all ranks.
        period: local steps of a round, at least 1.
        process_group: the group to average over; None is the default group.
        lr: learning rate of the outer optimizer, at least 0.
        momentum: momentum of the outer optimizer, in [0, 1].

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        params: Parameters,
        period: int,
        process_group: dist.ProcessGroup | None = None,
        lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        first = check_int("period", period, 1) - 1
        super().__init__(period, first, process_group, lr, momentum)
        for place, parameter in enumerate(trainable_parameters(params)):
            self._begin(place, parameter)


def _copies(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {place: tensor.clone() for place, tensor in tensors.items()}
