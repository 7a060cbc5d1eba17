"""Post-local SGD's other half: an optimizer whose steps are followed by averaging of parameters.

With ``optim`` any optimizer and ``averager`` one of ``hooks_ref.model_averaging``, a step is

    optim.step();  averager.average_parameters(optim.param_groups)

DDP averages the gradients in the warm-up, and less often or never after it: use
``post_localSGD_hook`` with a ``start_localSGD_iter`` equal to the averager's ``warmup_steps``.

Ranks have to average at the same steps. If this rank alone has an overflow and its ``GradScaler``
skips the step, only ``optim.step()`` is left out: the step is counted, and averages if it is due.

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020; torch
documentation, ``torch.distributed.optim.PostLocalSGDOptimizer`` (name, arguments).
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from hooks_ref.model_averaging import ModelAverager


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps ``optim``, and then lets ``averager`` average its parameters.

    Parameter groups and state are shared with ``optim``: a schedule of one applies to both.

    Args:
        optim: the optimizer of each rank's own steps.
        averager: its ``average_parameters`` is called after each step.

    Raises:
        TypeError: an argument has another type; the message names it.
    """

    # With this attribute, GradScaler always calls step(), which unscales gradients or skips itself.
    _step_supports_amp_scaling = True

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, torch.optim.Optimizer):
            raise TypeError(f"optim: an instance of torch.optim.Optimizer; got {optim!r}")
        if not hasattr(averager, "average_parameters"):
            raise TypeError(f"averager: a ModelAverager; got {averager!r}")
        super().__init__(optim.param_groups, optim.defaults)
        self.optim = optim
        self.averager = averager
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step, then average if it is due; return the result of ``closure``, or None."""
        loss = None
        if not self._overflows():
            loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "optim" in self.__dict__:
            self.optim.add_param_group(param_group)
        else:  # called by Optimizer.__init__, which checks the groups of optim
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``optim``, with ``"step"`` and ``"averager"`` from the averager."""
        kept = self.averager.state_dict() if hasattr(self.averager, "state_dict") else {}
        return {**self.optim.state_dict(), "step": self.averager.step, "averager": kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of this optimizer, or of torch's optimizer of this name.

        A saved state of another optimizer has no count of steps. The count is 0 then, so that a
        warm-up starts again, and a warning says so.
        """
        saved = dict(state_dict)
        if "step" not in saved:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. "
                "Setting step counter to 0.",
                stacklevel=2,
            )
        step = saved.pop("step", 0)
        kept = saved.pop("averager", None)
        self.optim.load_state_dict(saved)
        if kept:
            self.averager.load_state_dict(kept)
        self.averager.step = step
        self._share()

    def _share(self) -> None:
        self.param_groups = self.optim.param_groups
        self.state = self.optim.state
        self.defaults = self.optim.defaults

    def _overflows(self) -> bool:
        """Return whether a GradScaler has found an overflow in this rank's gradients.

        If it has found none, unscale the gradients, unless the GradScaler has unscaled them
        already.
        """
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        scale = getattr(self, "grad_scale", None)
        for group in self.param_groups if scale is not None else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
        return bool(found)
