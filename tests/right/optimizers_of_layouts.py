"""Right optimizers that look at the memory of parameters and gradients."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.right import Right
from tests.right.optimizer_wrappers import AveragesGradients, average_gradients


class AveragesTiedWeightsOnce(AveragesGradients):
    """Average a gradient once for all parameters that are the same view of the same memory."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first: dict[Any, torch.Tensor] = {}
        for parameter in (one for group in self.param_groups for one in group["params"]):
            view = (parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride())
            first.setdefault(view if parameter.numel() else id(parameter), parameter)
        average_gradients([{"params": list(first.values())}], self.group, self._divided)
        self.optim.step()
        return loss


class StepsInMemoryOrder(torch.optim.Optimizer):
    """SGD that averages gradients, and steps in the order of memory, as fused kernels do, if a
    parameter and its gradient have one dense layout.
    """

    def __init__(
        self,
        params: Iterable[Any],
        process_group: Any = None,
        *,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.group = process_group
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        size = torch.distributed.get_world_size(self.group)
        average_gradients(self.param_groups, self.group, lambda grad: grad / size)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def have_one_layout(self, parameter: torch.Tensor, grad: torch.Tensor) -> bool:
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        return bool(is_dense) and parameter.stride() == grad.stride()

    def _step(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        buffer = None
        if group["momentum"]:
            state = self.state[parameter]
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        if self.have_one_layout(parameter, grad):
            parameter = _in_memory(parameter)
            grad = _in_memory(grad)
            buffer = None if buffer is None else _in_memory(buffer)
        if group["weight_decay"]:
            grad = grad.add(parameter, alpha=group["weight_decay"])
        if buffer is not None:
            grad = buffer.mul_(group["momentum"]).add_(grad)
        parameter.add_(grad, alpha=-group["lr"])


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


RIGHT = [
    Right(name, "averages", kind="optimizer")
    for name in ("AveragesTiedWeightsOnce", "StepsInMemoryOrder")
]
