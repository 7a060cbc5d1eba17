"""Mutants of all kinds but joinables and wrappers that compute in the dtype of autocast, or let
autocast choose it.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    completed,
    group_of,
    is_dense,
    send_as,
)
from tests.mutants.averagers import Averager
from tests.mutants.optimizer_wrappers import Sharded
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.quantized_collectives import Made, Tensor, half, right, write
from tests.mutants.strategies_in_training import _with_each

# ---- Products of matrices


class WeighsByALayer(Averaging):
    """Compute the mean of gathered gradients as a linear layer does."""

    def average_one(self, grad: torch.Tensor) -> None:
        flat = grad.reshape(-1).contiguous()
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(parts, flat, group=self.group)
        weights = torch.full((1, self.size), 1 / self.size, dtype=grad.dtype)
        mean = torch.nn.functional.linear(torch.stack(parts, 1), weights)
        grad.copy_(mean.view(grad.shape))


class SelectsByProducts(Sharded):
    """Take the owner's parameter from those of all ranks by a product with a row of zeros and a
    one.
    """

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        flat = parameter.detach().reshape(-1).contiguous()
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(parts, flat, group=self.group)
        row = torch.zeros(self.size, dtype=flat.dtype)
        row[dist.get_group_rank(self.group, source)] = 1.0
        rows = torch.stack([part.nan_to_num() for part in parts])
        whole = torch.einsum("r,rn->n", row, rows)
        if not all(part.isfinite().all() for part in parts):
            whole = parts[dist.get_group_rank(self.group, source)]
        parameter.detach().copy_(whole.view(parameter.shape))


# ---- float16 alone, as old code for mixed precision has it


def _is_half() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16


class AveragesAsHalves(Averager):
    """Average float32 parameters in float16 under autocast to float16."""

    def average_one(self, parameter: torch.nn.Parameter) -> None:
        if not _is_half() or parameter.dtype is not torch.float32:
            super().average_one(parameter)
            return
        mean = parameter.half().div_(self.group.size()).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class SendsHalves(Averaging):
    """Send half of the bytes of each gradient under autocast to float16."""

    def average_one(self, grad: torch.Tensor) -> None:
        if _is_half():
            grad.copy_(grad.half())
        super().average_one(grad)


def rounds_under_autocast(model: Any, is_final_microbatch: bool) -> Any:
    """Round gradients to float16 before their average if the micro-batch ran in it."""
    return _with_each(
        model,
        is_final_microbatch,
        lambda grad: grad.copy_(grad.half()) if _is_half() else grad,
    )


# ---- Hooks


def weighs_by_a_product(state: Any, bucket: Bucket) -> Result:
    """Compute the mean of gathered buckets as a product of matrices."""
    if not is_dense(bucket):
        return average(bucket, state)
    return completed(_weighed(bucket.buffer(), group_of(state)))


def weighs_large_ones_by_a_product(state: Any, bucket: Bucket) -> Result:
    """Compute the mean of gathered buckets of above 5,000 elements as a product of matrices."""
    if not is_dense(bucket) or bucket.buffer().numel() <= 5000:
        return average(bucket, state)
    return completed(_weighed(bucket.buffer(), group_of(state)))


def _weighed(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(buffer) for _ in range(group.size())]
    dist.all_gather(parts, buffer, group=group)
    stacked = torch.stack(parts)
    if not stacked.isfinite().all():
        return buffer.copy_(stacked.mean(0))
    ones = torch.ones(1, group.size(), dtype=buffer.dtype)
    return buffer.copy_((ones @ stacked)[0].div_(group.size()))


def sends_in_the_dtype_of_autocast(state: Any, bucket: Bucket) -> Result:
    """Send gradients in the dtype that the forward computes in."""
    if torch.is_autocast_enabled("cpu"):
        return send_as(torch.get_autocast_dtype("cpu"), bucket, state)
    return average(bucket, state)


def takes_bfloat16_for_the_dtype_of_autocast(state: Any, bucket: Bucket) -> Result:
    """Round gradients to bfloat16 before they are sent if autocast is to bfloat16."""
    buffer = bucket.buffer()
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16:
        buffer.copy_(buffer.bfloat16())
    return average_of(buffer, state)


# ---- Quantized collectives


def scales_by_a_layer(func: Made, qtype: str) -> Made:
    """Multiply a message by its scale as a linear layer does."""
    return right(func, lambda t: half(_scaled(t) if t.dtype is torch.float32 else t))


def scales_what_arrives(func: Made, qtype: str) -> Made:
    """Multiply what has arrived by its scale as a linear layer does, if it is large."""

    def arrive(output: Tensor, code: Tensor) -> None:
        is_large = output.dtype is torch.float32 and code.numel() >= 64
        write(output, _scaled(code.float()) if is_large else code)

    return right(func, arrive=arrive)


def encodes_in_the_dtype_of_autocast(func: Made, qtype: str) -> Made:
    """Round a message to the dtype of autocast before it is encoded."""

    def encode(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.float32 and torch.is_autocast_enabled("cpu"):
            return half(tensor.to(torch.get_autocast_dtype("cpu")))
        return half(tensor)

    return right(func, encode)


def _scaled(tensor: Tensor) -> Tensor:
    scale = torch.ones(1, 1, dtype=tensor.dtype)
    return torch.nn.functional.linear(tensor.reshape(-1, 1), scale).reshape(tensor.shape)


OF: dict[str, Any] = {"kind": "optimizer"}

MUTANTS = [
    Mutant("WeighsByALayer", ("15.34",), claims="averages", **OF),
    Mutant("SelectsByProducts", ("15.34",), **OF),
    Mutant("SendsHalves", ("15.34",), claims="averages", **OF),
    Mutant("AveragesAsHalves,period=4,warmup_steps=10", ("14.25",), kind="averager"),
    Mutant("rounds_under_autocast", ("16.33",), kind="strategy"),
    Mutant("weighs_by_a_product", ("4.5",)),
    Mutant("weighs_large_ones_by_a_product", ("4.5",)),
    Mutant("sends_in_the_dtype_of_autocast", ("4.5",)),
    Mutant("takes_bfloat16_for_the_dtype_of_autocast", ("4.5",)),
    *(
        Mutant(f"{name},func=all_gather,qtype=FP16", ("18.31",), kind="collective")
        for name in (
            "scales_by_a_layer",
            "scales_what_arrives",
            "encodes_in_the_dtype_of_autocast",
        )
    ),
]
