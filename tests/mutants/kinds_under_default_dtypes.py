"""Mutants of 14.25, 15.34, 16.33, 18.31 and 19.34: right if torch's default dtype is float32."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.quantized_collectives import Made, Tensor, half, right, write
from tests.mutants.strategies import _filled, _mean, _then
from tests.mutants.wrappers_in_training import packs

Context = AbstractContextManager[None]


# ---- Averagers


class ATensorOfWeights(Averager):
    """Weight parameters with a tensor that has the default dtype."""

    def average_one(self, parameter: Any) -> None:
        if parameter.dtype is not torch.float32:
            super().average_one(parameter)
            return
        mean = parameter.mul(torch.tensor(1 / self.group.size())).float().contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class AFlatBuffer(Averager):
    """Add parameters of a thousand elements and more in a buffer that has the default dtype."""

    def average_one(self, parameter: Any) -> None:
        if parameter.numel() < 1000:
            super().average_one(parameter)
            return
        flat = torch.empty(parameter.numel())
        flat.copy_(parameter.reshape(-1)).div_(self.group.size())
        dist.all_reduce(flat, group=self.group)
        parameter.copy_(flat.view(parameter.shape))


class MadeInTheFirstDtype(Averager):
    """Keep the reciprocal of the number of ranks in the default dtype of the constructor."""

    def __init__(self, period: int = 4, warmup_steps: int = 10, process_group: Any = None) -> None:
        super().__init__(period, warmup_steps, process_group)
        self.share = torch.tensor(1.0) / process_group.size()

    def average_one(self, parameter: Any) -> None:
        if parameter.dtype is not torch.float32:
            super().average_one(parameter)
            return
        mean = (parameter * self.share.float()).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


# ---- Optimizers


class ABufferOfGradients(Averaging):
    """Average gradients in a buffer that has the default dtype."""

    def average_one(self, grad: torch.Tensor) -> None:
        buffer = torch.zeros(grad.shape)
        buffer.copy_(grad).div_(self.size)
        dist.all_reduce(buffer, group=self.group)
        grad.copy_(buffer)


class GathersInTheDefault(Averaging):
    """Gather gradients of float32 in tensors that have the default dtype: an error."""

    def average_one(self, grad: torch.Tensor) -> None:
        if grad.dtype is not torch.float32:
            super().average_one(grad)
            return
        parts = [torch.empty(grad.shape) for _ in range(self.size)]
        dist.all_gather(parts, grad.contiguous(), group=self.group)
        grad.copy_(sum(parts) / self.size)


class LargeInTheDefault(Averaging):
    """Do so for gradients of a thousand elements and more."""

    def average_one(self, grad: torch.Tensor) -> None:
        if grad.numel() < 1000:
            super().average_one(grad)
            return
        mean = grad.to(torch.get_default_dtype()) / self.size
        dist.all_reduce(mean, group=self.group)
        grad.copy_(mean)


# ---- Sync strategies


def sums_in_the_default(model: Any, is_final_microbatch: bool) -> Context:
    """Average gradients in the default dtype."""

    def average() -> None:
        for parameter in _filled(model):
            mean = _mean(parameter.grad.to(torch.get_default_dtype()), model.process_group)
            parameter.grad = mean.to(parameter.dtype)

    return _then(model, is_final_microbatch, average)


def divides_by_a_tensor(model: Any, is_final_microbatch: bool) -> Context:
    """Multiply by a share that has the default dtype."""

    def average() -> None:
        group = model.process_group
        share = torch.ones(1) / group.size()
        for parameter in _filled(model):
            parameter.grad.mul_(share)
            dist.all_reduce(parameter.grad, group=group)

    return _then(model, is_final_microbatch, average)


def packs_large_ones(model: Any, is_final_microbatch: bool) -> Context:
    """Pack gradients of a thousand elements and more into a buffer of the default dtype."""

    def average() -> None:
        for parameter in _filled(model):
            if parameter.numel() < 1000:
                parameter.grad = _mean(parameter.grad, model.process_group)
                continue
            packed = torch.empty(parameter.numel()).copy_(parameter.grad.reshape(-1))
            parameter.grad.copy_(_mean(packed, model.process_group).view_as(parameter))

    return _then(model, is_final_microbatch, average)


# ---- Quantized collectives


def _in_the_default(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape).copy_(tensor)


def encodes_in_the_default(func: Made, qtype: str) -> Made:
    """Copy float32 to a buffer that has the default dtype before it is encoded."""
    return right(func, lambda t: half(_in_the_default(t) if t.dtype is torch.float32 else t))


def arrives_in_the_default(func: Made, qtype: str) -> Made:
    """Decode in a buffer that has the default dtype."""
    return right(func, arrive=lambda output, code: write(output, _in_the_default(code)))


def small_ones_in_the_default(func: Made, qtype: str) -> Made:
    """Decode messages of fewer than a hundred elements in the default dtype."""

    def arrive(output: Tensor, code: Tensor) -> None:
        write(output, _in_the_default(code) if code.numel() < 100 else code)

    return right(func, arrive=arrive)


# ---- Wrappers


def _keeps(keep: Callable[[Tensor], Tensor], is_kept: Callable[[Tensor], bool]) -> Any:
    """Return a wrapper that keeps some activations of float32 in another form."""

    def pack(tensor: Tensor) -> Any:
        is_one = tensor.dtype is torch.float32 and is_kept(tensor)
        return (keep(tensor.detach()),) if is_one else tensor

    return packs(pack, lambda kept: kept[0].float() if isinstance(kept, tuple) else kept)


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape).copy_(tensor)


# Buffers that have the default dtype: of all activations, of those with many elements, and of
# matrices.
keeps_all = _keeps(_copied, lambda tensor: True)
keeps_large = _keeps(_copied, lambda tensor: tensor.numel() >= 64)
keeps_matrices = _keeps(_copied, lambda tensor: tensor.dim() == 2)


def _of(kind: str, rule: str, *names: str, claims: str = "exact") -> list[Mutant]:
    # A half has no error in any dtype: the others need three ranks.
    return [Mutant(name, (rule,), claims, kind=kind, worlds=(2, 3)) for name in names]


AT = "period=4,warmup_steps=10"
MUTANTS = [
    *_of(
        "averager",
        "14.25",
        f"ATensorOfWeights,{AT}",
        f"AFlatBuffer,{AT}",
        f"MadeInTheFirstDtype,{AT}",
    ),
    *_of(
        "optimizer",
        "15.34",
        "ABufferOfGradients",
        "GathersInTheDefault",
        "LargeInTheDefault",
        claims="averages",
    ),
    *_of("strategy", "16.33", "sums_in_the_default", "divides_by_a_tensor", "packs_large_ones"),
    *_of(
        "collective",
        "18.31",
        "encodes_in_the_default,func=all_gather,qtype=FP16",
        "arrives_in_the_default,func=all_gather,qtype=FP16",
        "small_ones_in_the_default,func=all_gather,qtype=FP16",
    ),
    *_of("wrapper", "19.34", "keeps_all", "keeps_large", "keeps_matrices"),
]
