"""How training scripts step: six optimizers with groups, a schedule, clipping and a gradient scaler.

Ranks train by it after backward (``trainee.py``), under the hook and under vanilla DDP (section 6): the same operations in
the same order on one thread, so that the same gradients give parameters of the same bits.
"""

from collections.abc import Callable
from typing import Any

import torch

MAX_NORM = 100.0  # of the gradients of one optimizer: some are larger
FIRST_SCALE = 8.0
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda groups: torch.optim.SGD(groups, lr=0.1),
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.1),
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    lambda groups: torch.optim.AdamW(groups, lr=0.01),
    lambda groups: torch.optim.Adagrad(groups, lr=0.05, lr_decay=0.01),
)


class Recipe:
    """Steps a model.

    Args:
        parameters: two for each of ``OPTIMIZERS``, each in a group of its own.
        device: the type of theirs.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], device: str) -> None:
        self._optimizers = [
            make([{"params": [one]}, {"params": [other], "weight_decay": 0.1}])
            for make, one, other in zip(OPTIMIZERS, parameters[::2], parameters[1::2], strict=True)
        ]
        self._schedules = [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5) for optimizer in self._optimizers]
        self._scaler = torch.amp.GradScaler(device, init_scale=FIRST_SCALE, growth_interval=2)
        self._scaler.scale(torch.zeros((), device=device))  # it has no scale before a loss is

    @property
    def scale(self) -> int:
        """What the loss of the next step is multiplied by: a power of two, doubled after two steps, halved after an overflow."""
        return int(self._scaler.get_scale())

    def step(self) -> None:
        """Unscale the gradients of each optimizer, clip them, and step it; not one where the scaler has found an overflow."""
        before = self.scale
        for optimizer in self._optimizers:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], MAX_NORM)
            self._scaler.step(optimizer)
        self._scaler.update()
        if self.scale >= before:
            for schedule in self._schedules:
                schedule.step()
