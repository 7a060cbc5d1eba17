"""Mutants of section 15: several backwards before a step, gradients of zeros on all ranks, averages
beside DDP's, and states that are saved right after a load.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal
from tests.right.optimizer_wrappers import (
    AveragesGradients,
    AveragesInBackward,
    KeepsInBuffers,
    average_gradients,
)


class ReplacesInBuffers(KeepsInBuffers):
    """Let a later backward's gradient take the place of the one in the buffer."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.last: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(optim, process_group)

    def _take(self, parameter: torch.Tensor) -> None:
        last = self.last.pop(parameter, None)
        if last is not None and parameter.grad is self.buffers[parameter]:
            parameter.grad.sub_(last)
        super()._take(parameter)
        assert parameter.grad is not None
        self.last[parameter] = parameter.grad.clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.last.clear()
        super().zero_grad(set_to_none)


class MovesIntoBuffers(KeepsInBuffers):
    """Add each gradient to a buffer, and free it: the optimizer's own zero_grad() clears the
    buffers, and clipping finds no gradient.
    """

    def _take(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        parameter.grad = None
        if parameter in self.buffers:
            self.buffers[parameter] += grad
        elif grad is not None:
            self.buffers[parameter] = grad

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, grad in self.buffers.items():
            parameter.grad = grad
        self.buffers.clear()
        super().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.buffers.clear()
        super().zero_grad(set_to_none)


class AddsToItsBuffers(KeepsInBuffers):
    """Add a new ``p.grad`` to the buffer, which its own step() and zero_grad() clear."""

    def _take(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if parameter not in self.buffers:
            self.buffers[parameter] = grad.clone()
        elif grad is not self.buffers[parameter]:
            self.buffers[parameter] += grad
        parameter.grad = self.buffers[parameter]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.buffers.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.buffers.clear()
        super().zero_grad(set_to_none)


class KeepsDroppedGradients(AddsToItsBuffers):
    """Clear no buffer in zero_grad(): dropped gradients are added to those of the next step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        AveragesGradients.zero_grad(self, set_to_none)


class _Hooked(AveragesGradients):
    """Run a method after each gradient: right."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrives)

    def arrives(self, parameter: torch.Tensor) -> None:
        """Take note of a gradient."""


class CopiesInHooks(_Hooked):
    """Average copies that hooks have taken of gradients: clipping scales ``p.grad`` in vain."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(optim, process_group)

    def arrives(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.copies[parameter] = parameter.grad.clone()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, copy in self.copies.items():
            if parameter.grad is not None:
                parameter.grad.copy_(copy)
        self.copies.clear()
        super().step()
        return loss


class DividesInHooks(_Hooked):
    """Divide ``p.grad`` in a hook: a second backward divides the first one's gradient again."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.divided: set[torch.Tensor] = set()
        super().__init__(optim, process_group)

    def arrives(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(dist.get_world_size(self.group))
        self.divided.add(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self.divided:
            if parameter.grad is not None:
                # The base class divides what hooks have not divided.
                parameter.grad.mul_(dist.get_world_size(self.group))
        self.divided.clear()
        super().step()
        return loss


class MarksInHooks(_Hooked):
    """Step the parameters that hooks have seen since the last step, as with gradients of zeros."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.seen: list[torch.Tensor] = []
        super().__init__(optim, process_group)

    def arrives(self, parameter: torch.Tensor) -> None:
        self.seen.append(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for parameter in self.seen:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.seen.clear()
        loss = super().step(closure)
        self.seen.clear()
        return loss


class DividesByBackwards(_Hooked):
    """Divide gradients by the number of backwards, as if each had a whole loss."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.backwards: dict[torch.Tensor, int] = {}
        super().__init__(optim, process_group)

    def arrives(self, parameter: torch.Tensor) -> None:
        self.backwards[parameter] = self.backwards.get(parameter, 0) + 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for parameter, count in self.backwards.items():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        self.backwards.clear()
        loss = super().step(closure)
        self.backwards.clear()
        return loss


class _CarriesOver(_Hooked):
    """Average sums of what hooks have seen, and carry changes of ``p.grad`` over to them."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(optim, process_group)

    def arrives(self, parameter: torch.Tensor) -> None:
        if self.keeps(parameter):
            assert parameter.grad is not None
            self.sums[parameter] = parameter.grad.clone()

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Return whether there is a sum for a parameter."""
        return True

    def carried_over(self, kept: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient that is averaged.

        Args:
            kept: the sum of the gradients of all backwards.
            grad: ``p.grad``, which may have been changed since.
        """
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, kept in self.sums.items():
            if parameter.grad is not None:
                parameter.grad = self.carried_over(kept, parameter.grad)
        self.sums.clear()
        super().step()
        return loss


class ScalesByNorms(_CarriesOver):
    """Scale the sum by the quotient of the norms, which is right for clipping alone."""

    def carried_over(self, kept: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        norm = float(kept.double().norm())
        return kept * (float(grad.double().norm()) / norm) if norm else grad


class BoundsChanges(_CarriesOver):
    """Take elements of ``p.grad`` up to twice the sum, as clipping and masks leave them."""

    def carried_over(self, kept: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.where(grad.abs() <= 2 * kept.abs(), grad, kept)


class KeepsWholeRows(_CarriesOver):
    """Take ``p.grad`` if all its rows were changed, and the sum otherwise."""

    def carried_over(self, kept: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        rows = (kept != grad).reshape(len(kept) if kept.dim() else 1, -1).any(1)
        return grad if bool(rows.all()) else kept


class SumsOfBfloat16(_CarriesOver):
    """Average the gradients of bfloat16 from sums of its own, which clipping does not reach."""

    def keeps(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype == torch.bfloat16

    def carried_over(self, kept: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return kept


class FactorsOfFloat16(SumsOfBfloat16):
    """Carry over one factor of each gradient of float16, that of its largest element."""

    def keeps(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype == torch.float16

    def carried_over(self, kept: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        largest = kept.double().abs().amax()
        factor = grad.double().abs().amax() / largest if largest else 1.0
        return (kept.double() * factor).to(kept.dtype)


class _Selects(AveragesGradients):
    """Average the gradients of chosen parameters alone, before the others lose theirs."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.select([one for group in self.param_groups for one in group["params"]])
        super().step()
        return loss

    def select(self, params: list[torch.Tensor]) -> None:
        raise NotImplementedError


class LeavesOutZeros(_Selects):
    """Step a parameter if some rank has a gradient of it with a norm above zero."""

    def select(self, params: list[torch.Tensor]) -> None:
        norms = torch.tensor([0.0 if p.grad is None else float(p.grad.norm()) for p in params])
        norms = norms.nan_to_num(1.0, 1.0, 1.0)
        dist.all_reduce(norms, dist.ReduceOp.MAX, self.group)
        for parameter, norm in zip(params, norms.tolist(), strict=True):
            if not norm:
                parameter.grad = None


class LeavesOutZeroMeans(AveragesGradients):
    """Take a mean of zeros for the gradient of a parameter that no rank has used."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        super().__init__(optim, process_group)
        self.optim.register_step_pre_hook(self._leave_out)

    def _leave_out(self, optim: torch.optim.Optimizer, *_: Any) -> None:
        for group in optim.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.count_nonzero():
                    parameter.grad = None


class LoadsAtTheNextStep(PostLocal):
    """Keep loaded moments until the next step: a state that is saved before has none."""

    pending: dict[str, Any] | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pending = state_dict["optim"]["state"]
        super().load_state_dict({**state_dict, "optim": {**state_dict["optim"], "state": {}}})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.pending is not None:
            # Options may have been written since the load.
            groups = self.optim.state_dict()["param_groups"]
            self.optim.load_state_dict({"state": self.pending, "param_groups": groups})
            self.pending = None
        return super().step(closure)


class AveragesBesideDDP(AveragesInBackward):
    """Average in a callback at the end of the backward, before DDP waits for its means."""

    def _queue_average(self) -> None:
        self._average()


class PacksBesideDDP(AveragesInBackward):
    """Average in such a callback as one flat tensor of each dtype, sums before the division."""

    @torch.no_grad()
    def _queue_average(self) -> None:
        self.is_queued = False
        self.is_averaged = True
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        if any(grad is None for grad in grads):
            average_gradients(self.param_groups, self.group, self._divided)
            return
        for dtype in {grad.dtype: None for grad in grads}:
            of_dtype = [grad for grad in grads if grad.dtype == dtype]
            flat = torch.cat([self._divided(grad).reshape(-1) for grad in of_dtype])
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([grad.numel() for grad in of_dtype])
            for grad, part in zip(of_dtype, parts, strict=True):
                grad.copy_(part.view_as(grad))


MUTANTS = [
    *(Mutant(name, ("15.28",), kind="optimizer") for name in ("LoadsAtTheNextStep",)),
    *(
        Mutant(name, ("15.43",), "averages", kind="optimizer")
        for name in (
            *("ReplacesInBuffers", "KeepsDroppedGradients", "DividesInHooks", "MarksInHooks"),
            *("DividesByBackwards", "MovesIntoBuffers", "AddsToItsBuffers", "CopiesInHooks"),
            *("ScalesByNorms", "BoundsChanges", "KeepsWholeRows"),
            *("SumsOfBfloat16", "FactorsOfFloat16"),
        )
    ),
    *(
        Mutant(name, ("15.9",), "averages", kind="optimizer")
        for name in ("LeavesOutZeros", "LeavesOutZeroMeans")
    ),
    *(
        Mutant(name, ("15.16",), "averages", kind="optimizer")
        for name in ("AveragesBesideDDP", "PacksBesideDDP")
    ),
]
