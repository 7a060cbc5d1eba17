"""A moving average of the group's mean parameters, for evaluation; training is not affected.

With ``x_r`` the parameters of rank ``r``, ``G`` the group, ``d`` the decay, at
``t = w, w + p, w + 2 p, ...``

    s <- mean over G of x                          the first time
    s <- d s + (1 - d) mean over G of x            from then on

and ``x_r`` do not change. If gradients are averaged in every step, ranks hold the same ``x`` and
``s`` is an ordinary exponential moving average; otherwise it is the average of a model that no rank
holds.

Source: Polyak, Juditsky, "Acceleration of Stochastic Approximation by Averaging", SIAM J. Control
and Optimization, 1992; torch documentation, ``torch.optim.swa_utils.get_ema_multi_avg_fn`` (the
recurrence).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hooks_ref._state import check_number
from hooks_ref.model_averaging import (
    Parameters,
    PeriodicModelAverager,
    average_parameters,
    trainable_parameters,
)


class EMAModelAverager(PeriodicModelAverager):
    """Every ``period`` steps, moves an average towards the mean of the group's parameters.

    Keeps one tensor for each parameter, in the parameter's dtype, or in float32 for half precision.
    It is stored by the parameter's place among the given parameters, so the order of parameters has
    to stay the same. All parameters are averaged, with a gradient or without; integers have no
    average, and stay as they are.

    Args:
        decay: the share of the old average in the new one, in [0, 1].
        period: steps from one update to the next, at least 1.
        warmup_steps: steps before the first update, at least 0.
        process_group: the group; None is the default group.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        decay: float,
        period: int = 1,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(period, warmup_steps, process_group)
        self.decay = check_number("decay", decay, 0, 1)
        self.average: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def average_parameters(self, params: Parameters) -> None:
        if self.is_due():
            # In wide copies: half precision would lose the small change of a step.
            means = [
                p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
                for p in trainable_parameters(params)
            ]
            average_parameters(means, self.group)
            for place, mean in enumerate(means):
                if place in self.average:
                    mean = self.average[place].lerp_(mean, 1 - self.decay)
                self.average[place] = mean
        self.step += 1

    @contextmanager
    def applied(self, params: Parameters) -> Iterator[None]:
        """Write the average into ``params`` inside the context, and restore their values after it.

        Communicates nothing.

        Args:
            params: the parameters or parameter groups that are averaged.

        Raises:
            RuntimeError: there is no average yet.
        """
        parameters = trainable_parameters(params)
        if len(self.average) < len(parameters):
            raise RuntimeError(
                f"there is an average of {len(self.average)} of {len(parameters)} parameters: "
                f"none was due yet"
            )
        held = [parameter.detach().clone() for parameter in parameters]
        try:
            self._set(parameters, list(self.average.values()))
            yield
        finally:
            self._set(parameters, held)

    @staticmethod
    @torch.no_grad()
    def _set(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "average": {place: kept.clone() for place, kept in self.average.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self.average = {place: kept.clone() for place, kept in saved["average"].items()}
