"""An optimizer as users write their own, for wrappers to wrap."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


class UserOptimizer(torch.optim.Optimizer):
    """Steps with the sum of all gradients, and with a multiple of the previous gradient.

    With g a parameter's gradient, s the sum of its gradients and p the previous one, step t is

        s <- s + g;  x <- x - lr (s + (t mod 5) share p);  p <- g

    None of torch's optimizers has a state like this one: it has no tensor but in a dict and a list
    inside, and its count is an integer. All results are exact if the options are powers of two.

    Args:
        params: parameters, or groups of them.
        lr, share: see above.
        implementation: options such as ``foreach``, which a target may have for torch's optimizers.
            They choose between implementations there, and there is one here.
    """

    def __init__(
        self, params: Any, lr: float = 0.125, share: float = 0.5, **implementation: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "share": share})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step; return the result of ``closure``, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
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
        share = state["turns"] % 5 * options["share"]
        parameter.sub_(options["lr"] * (total + share * previous))
        previous.copy_(grad)
