"""The optimizers of training scripts: six, with groups, schedules, clipping and a gradient scaler.

Ranks step by it after backward (``ddp_model.py``), under the hook and under vanilla DDP (section
6): the same operations in the same order on one thread, so that the same gradients give parameters
of the same bits.
"""

from collections.abc import Callable
from typing import Any

import torch

MAX_NORM = 100.0  # of one optimizer's gradients: some are larger
FIRST_SCALE = 8.0
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda groups: torch.optim.SGD(groups, lr=0.1),
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.1),
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    lambda groups: torch.optim.AdamW(groups, lr=0.01),
    lambda groups: torch.optim.Adagrad(groups, lr=0.05, lr_decay=0.01),
)


class TrainingLoop:
    """Steps a model.

    Args:
        parameters: two for each of ``OPTIMIZERS``, each in a group of its own.
        device: the type of their device.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], device: str) -> None:
        self._optimizers = [
            make([{"params": [one]}, {"params": [other], "weight_decay": 0.1}])
            for make, one, other in zip(OPTIMIZERS, parameters[::2], parameters[1::2], strict=True)
        ]
        self._schedules = [
            torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
            for optimizer in self._optimizers
        ]
        self._scaler = torch.amp.GradScaler(device, init_scale=FIRST_SCALE, growth_interval=2)
        # The scaler makes its scale when it scales its first loss.
        self._scaler.scale(torch.zeros((), device=device))

    @property
    def scale(self) -> int:
        """The factor of the next step's loss.

        It is a power of two, doubled after two steps and halved after an overflow.
        """
        return int(self._scaler.get_scale())

    def step(self) -> None:
        """Unscale, clip and step each optimizer, unless the scaler has found an overflow there."""
        before = self.scale
        for optimizer in self._optimizers:
            self._scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            self._scaler.step(optimizer)
        self._scaler.update()
        if self.scale >= before:
            for schedule in self._schedules:
                schedule.step()
