"""Training steps of an optimizer wrapper with a ``GradScaler`` around it."""

import math

import torch

from conformance.scenarios.optimizer import Scaling


class Scaler:
    """A GradScaler, and its plan.

    Args:
        plan: the steps with an overflow, and the scales.
        device: of the parameters.
        optimizer: the subject's.
        takes_scale: whether the optimizer has the attribute ``_step_supports_amp_scaling``.
        alone: whether one rank alone has an overflow in some steps.

    Attributes:
        is_refused: the optimizer cannot be used with a GradScaler, which raises an exception.
    """

    def __init__(
        self,
        plan: Scaling,
        device: torch.device,
        optimizer: torch.optim.Optimizer,
        takes_scale: bool,
        alone: bool,
    ) -> None:
        self._plan = plan
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(
            device.type, init_scale=plan.first_scale, growth_interval=plan.interval
        )
        self._takes_scale = takes_scale
        self.alone = alone
        self.is_refused = False

    def can_step(self) -> bool:
        """Whether the optimizer can be used with a GradScaler, or declares that it can.

        ``GradScaler.step`` raises an exception if it finds no gradient to unscale in the groups of
        an optimizer that does not take the scale itself.
        """
        if self._takes_scale:
            return True
        groups = self._optimizer.param_groups
        return any(p.grad is not None for group in groups for p in group["params"])

    def overflows(self, step: int, place: int, size: int) -> bool:
        """Whether the rank in a place of its group has an overflow at a step."""
        return self._plan.overflows(step, place, size, self.alone)

    def scaled(
        self, grads: list[torch.Tensor | None], step: int, overflows: bool
    ) -> list[torch.Tensor | None]:
        """Return the gradients of a step's scaled loss; with infinities in some if it overflows."""
        scale = self._scaler.get_scale()
        scaled = [None if grad is None else grad * scale for grad in grads]
        for index in self._plan.infinite(step, len(grads)) if overflows else ():
            grad = scaled[index]
            if grad is not None:
                grad[(0,) * grad.dim()] = math.inf
        return scaled

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of the scaled loss."""
        self._scaler.scale(loss).backward()

    def unscale(self, step: int, params: list[torch.nn.Parameter] | None) -> None:
        """Unscale the gradients before the step in some steps, and clip those of ``params``."""
        if step not in self._plan.unscaled:
            return
        self._scaler.unscale_(self._optimizer)
        if params is not None:
            torch.nn.utils.clip_grad_value_(params, self._plan.clip)

    def step(self) -> None:
        """Step the optimizer, unless the gradients overflow."""
        self._scaler.step(self._optimizer)

    def update(self, step: int) -> None:
        """Update the scale after a step."""
        self._scaler.update(self._plan.set_after(step))
