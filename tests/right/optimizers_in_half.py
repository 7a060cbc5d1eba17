"""Right optimizers of parameters in half precision, with copies, states, sums or gradients in
float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right.optimizer_wrappers import AveragesGradients, average_gradients

HALVES = (torch.float16, torch.bfloat16)


class InFloat32(torch.optim.Optimizer):
    """SGD on averaged gradients. Weights in half precision have copies and momenta in float32."""

    def __init__(
        self,
        params: Any,
        process_group: Any = None,
        *,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.group = process_group
        self.prepare()
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def prepare(self) -> None:
        """Make the attributes of a subclass."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        size = dist.get_world_size(self.group)
        average_gradients(self.param_groups, self.group, lambda grad: grad / size)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: torch.Tensor, grad: torch.Tensor, options: dict[str, Any]) -> None:
        state = self.state[parameter]
        is_half = parameter.dtype in HALVES
        weight = self._weight(parameter) if is_half else parameter
        grad = grad.to(weight.dtype).add(weight, alpha=options["weight_decay"])
        if options["momentum"]:
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(options["momentum"]).add_(grad)
            else:
                state["momentum_buffer"] = grad.clone()
            grad = state["momentum_buffer"]
        weight.add_(grad, alpha=-options["lr"])
        if is_half:
            state["weight"] = weight
            parameter.copy_(weight)

    def _weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the copy of a weight, with the elements that were written since the last step."""
        weight = self.state[parameter].get("weight")
        if weight is None:
            return parameter.float()
        return torch.where(weight.to(parameter.dtype) == parameter, weight, parameter.float())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, kept in state_dict["state"].items():
            for name, value in kept.items():
                self.state[every[number]][name] = self.put_back(every[number], name, value)

    def put_back(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a loaded tensor of a parameter's state, in the dtype in which it was saved."""
        return value.clone()


class CopiesApart(InFloat32):
    """The same, with the copies of weights in a dict of their own, which is saved by number."""

    def prepare(self) -> None:
        self.copies: dict[int, torch.Tensor] = {}

    def number(self, parameter: torch.Tensor) -> int:
        """Return the key of a parameter: its place in the groups."""
        every = [one for group in self.param_groups for one in group["params"]]
        return next(place for place, one in enumerate(every) if one is parameter)

    def _step(self, parameter: torch.Tensor, grad: torch.Tensor, options: dict[str, Any]) -> None:
        number = self.number(parameter)
        if number in self.copies:
            self.state[parameter]["weight"] = self.copies[number]
        super()._step(parameter, grad, options)
        copy = self.state[parameter].pop("weight", None)
        if copy is not None:
            self.copies[number] = copy

    def state_dict(self) -> dict[str, Any]:
        copies = {number: copy.clone() for number, copy in self.copies.items()}
        return {**super().state_dict(), "copies": copies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = dict(state_dict)
        self.copies = {number: copy.clone() for number, copy in saved.pop("copies").items()}
        super().load_state_dict(saved)


class SumsInFloat32(AveragesGradients):
    """Average sums in float32 of gradients in half precision, unless ``p.grad`` was changed since
    the last backward: that is averaged then.
    """

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self.seen: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(optim, process_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype in HALVES and parameter.requires_grad:
                parameter.register_hook(partial(self._add, parameter))
                parameter.register_post_accumulate_grad_hook(self._see)

    def _add(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if parameter.grad is None:
            total = torch.zeros_like(grad, dtype=torch.float32)
        elif self._is_changed(parameter):
            total = parameter.grad.float()
        else:
            total = self.sums[parameter]
        self.sums[parameter] = total + grad

    def _see(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.seen[parameter] = parameter.grad.clone()

    def _is_changed(self, parameter: torch.Tensor) -> bool:
        seen = self.seen.get(parameter)
        return seen is None or parameter.grad is None or not torch.equal(parameter.grad, seen)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, total in self.sums.items():
            if not self._is_changed(parameter):
                parameter.grad = total.to(parameter.dtype)
        self.sums.clear()
        self.seen.clear()
        super().step()
        return loss


def dtype_of_gradient(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the gradient that a parameter has, or of its next one."""
    if parameter.grad is not None:
        return parameter.grad.dtype
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class AveragesByGradientDtypes(AveragesGradients):
    """Average all gradients of one dtype in one buffer, whatever the dtypes of their weights."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        used = torch.tensor([parameter.grad is not None for parameter in every]).int()
        dist.all_reduce(used, group=self.group)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter, ranks in zip(every, used.tolist(), strict=True):
            if ranks:
                dtype = dtype_of_gradient(parameter)
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=dtype)
                by_dtype.setdefault(dtype, []).append(parameter.grad)
        for dtype in sorted(by_dtype, key=str):
            grads = by_dtype[dtype]
            buffer = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(buffer.div_(dist.get_world_size(self.group)), group=self.group)
            parts = buffer.split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view(grad.shape))
        self.optim.step()
        return loss


class RefusesWideGradients(AveragesGradients):
    """Raise an error for a gradient of another dtype than its weight."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                    raise TypeError("a gradient has another dtype than its weight")
        return super().step(closure)


class RefusesHalf(AveragesGradients):
    """Raise an error for weights in half precision, when a group is made."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if any(parameter.dtype in HALVES for parameter in self.param_groups[-1]["params"]):
            raise TypeError("weights in half precision need copies in float32")


RIGHT = [
    Right(name, "averages", kind="optimizer")
    for name in (
        *("InFloat32", "CopiesApart", "SumsInFloat32"),
        *("AveragesByGradientDtypes", "RefusesWideGradients", "RefusesHalf"),
    )
]
