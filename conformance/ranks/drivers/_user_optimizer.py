"""An optimizer as users write their own, for wrappers to wrap."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


class UserOptimizer(torch.optim.Optimizer):
    """Steps with the sum of all gradients, and with multiples of the last two gradients.

    With g a parameter's gradient, s the sum of its gradients and p the previous one, t the number
    of the parameter's steps and u that of its group's, a step is

        s <- s + g;  x <- x - lr (s + share ((t mod 5) p + (2 u mod 5) g));  p <- g

    None of torch's optimizers has a state like this one: it has no tensor but in a dict and a list
    inside, and its counts are integers. A group's own count is an entry of the group, as the
    numbers of schedule-free optimizers and of Prodigy are; it counts a step whether or not
    parameters have gradients. It is kept twice, and the two are added up: as one of the defaults,
    and in an entry that the first step makes, as that of FusedAdam of NVIDIA apex.
    All results are exact if the options are powers of two.

    Args:
        params: parameters, or groups of them.
        lr, share: see above.
        implementation: options such as ``foreach``, which a target may have for torch's optimizers.
            They choose between implementations there, and there is one here.
    """

    def __init__(
        self, params: Any, lr: float = 0.125, share: float = 0.5, **implementation: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "share": share, "turns": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step; return the result of ``closure``, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["turns"] += 1
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(
        self, parameter: torch.Tensor, grad: torch.Tensor, options: Mapping[str, Any]
    ) -> None:
        state = self.state[parameter]
        if not state:
            zeros = torch.zeros_like(parameter)
            state.update(turns=0, memory={"sum": zeros}, recent=[zeros.clone()])
        state["turns"] += 1
        total = state["memory"]["sum"].add_(grad)
        (previous,) = state["recent"]
        of_group = options["turns"] + options["steps"]
        turns = state["turns"] % 5 * previous + of_group % 5 * grad
        parameter.sub_(options["lr"] * (total + options["share"] * turns))
        previous.copy_(grad)
