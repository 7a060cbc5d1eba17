"""Post-local SGD's other half: an optimizer that averages parameters after its steps, as its averager says.

With ``optim`` any optimizer and ``averager`` one of ``hooks_ref.model_averaging``, a step is

    optim.step();  averager.average_parameters(optim.param_groups)

Gradients are averaged by DDP in the warm-up, and by less or nothing after it: ``post_localSGD_hook`` with a
``start_localSGD_iter`` equal to the averager's ``warmup_steps``.

Ranks have to average at the same steps. So a step that a ``GradScaler`` skips, because this rank alone has an overflow,
leaves out ``optim.step()`` and nothing else: it is counted, and averages where it is due.

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020; torch documentation,
``torch.distributed.optim.PostLocalSGDOptimizer`` (name, arguments).
"""

from collections.abc import Callable
from typing import Any

import torch

from hooks_ref.model_averaging import ModelAverager


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps ``optim``, and then averages its parameters as ``averager`` says.

    Parameter groups and state are those of ``optim``: a schedule of either is one of both.

    Args:
        optim: the optimizer of each rank's own steps, made already.
        averager: what is asked to average after each of them.

    Raises:
        TypeError: an argument is something else; the message names it.
    """

    # GradScaler then calls step() always, and leaves it to step() to unscale gradients, or to skip itself.
    _step_supports_amp_scaling = True

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, torch.optim.Optimizer):
            raise TypeError(f"optim: an optimizer, made already; got {optim!r}")
        if not hasattr(averager, "average_parameters"):
            raise TypeError(f"averager: a ModelAverager; got {averager!r}")
        super().__init__(optim.param_groups, optim.defaults)
        self.optim, self.averager = optim, averager
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step, then average if it is due; return what ``closure`` returned, or None."""
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
        else:  # Optimizer.__init__ looks at what there is
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``optim``, with the averager's under ``"averager"`` and its count under ``"step"``."""
        kept = self.averager.state_dict() if hasattr(self.averager, "state_dict") else {}
        return {**self.optim.state_dict(), "step": self.averager.step, "averager": kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was called, here or in torch's optimizer of this name.

        Raises:
            KeyError: there is no count of steps in it, so that a warm-up would start again.
        """
        saved = dict(state_dict)
        if "step" not in saved:
            raise KeyError(
                "step: this was not saved by a PostLocalSGDOptimizer; load it into optim, and set averager.step"
            )
        step, kept = saved.pop("step"), saved.pop("averager", None)
        self.optim.load_state_dict(saved)
        if kept:
            self.averager.load_state_dict(kept)
        self.averager.step = step
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state, self.defaults = (
            self.optim.param_groups,
            self.optim.state,
            self.optim.defaults,
        )

    def _overflows(self) -> bool:
        """Whether a GradScaler has found this rank's gradients to overflow; if not, unscale them, where it has not done so."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        scale = getattr(self, "grad_scale", None)
        for group in self.param_groups if scale is not None else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
        return bool(found)
