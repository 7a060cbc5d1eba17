"""Mutants that read memory before they have written it, of several kinds of subject.

Memory that the system has just handed out is zero, and these are right then: each takes memory by
``torch.empty`` where it needs zeros.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average_of, completed, gather, group_of
from tests.mutants.averagers import Averager
from tests.mutants.quantized import send_mean, widened
from tests.mutants.quantized_collectives import GROUP, eighths, from_eighths, right

_BLOCK = 64
_FROM_THE_SYSTEM = 32 << 20  # bytes; glibc's largest threshold for mmap


def sums_onto_new_memory(state: Any, bucket: Bucket) -> Result:
    """Add the parts of all ranks to a sum that does not begin with zeros."""
    buffer = bucket.buffer()
    if buffer.is_sparse:
        return average_of(buffer, state)
    total = torch.empty_like(buffer)
    for part in gather(buffer, state):
        total += part / group_of(state).size()
    return completed(buffer.copy_(total))


def sums_large_onto_new_memory(state: Any, bucket: Bucket) -> Result:
    """Add the parts of large buckets alone to a sum that does not begin with zeros.

    The C library asks the system for so much memory in each call, and gets zeros.
    """
    if bucket.buffer().is_sparse or bucket.buffer().nbytes <= _FROM_THE_SYSTEM:
        return average_of(bucket.buffer(), state)
    return sums_onto_new_memory(state, bucket)


def range_of_padding(state: Any, bucket: Bucket) -> Result:
    """Quantize with a range that is taken from whole blocks, whose padding is not written."""
    wide = widened(bucket)
    padded = torch.empty(-(-wide.numel() // _BLOCK) * _BLOCK)
    padded[: wide.numel()] = wide
    scale = (padded.abs().amax() / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return send_mean(bucket, (wide / scale).round() * scale, state)


def residual_in_new_memory(state: dict[Any, torch.Tensor], bucket: Bucket) -> Result:
    """Send float16, and keep what is lost in memory that does not begin with zeros."""
    buffer = bucket.buffer()
    if buffer.is_sparse or buffer.is_complex() or buffer.dtype is not torch.float32:
        return average_of(buffer, None)
    start = 0
    for parameter in bucket.parameters():
        piece = buffer[start : start + parameter.numel()]
        start += parameter.numel()
        residual = state.setdefault(parameter, torch.empty_like(piece))
        piece += residual
        sent = piece.clamp(-65504, 65504).half().float()
        residual.copy_((piece - sent).nan_to_num_(0, 0, 0))
        piece.copy_(sent)
    return average_of(buffer, None)


class SumsOntoNewMemory(Averager):
    """Add the parameters of all ranks to a sum that does not begin with zeros."""

    def average_one(self, parameter: torch.Tensor) -> None:
        size = self.group.size()
        parts = [torch.empty_like(parameter).contiguous() for _ in range(size)]
        dist.all_gather(parts, parameter.detach().contiguous(), group=self.group)
        total = torch.empty_like(parts[0])
        for part in parts:
            total += part / size
        parameter.copy_(total)


def scale_of_padding(func: Callable[..., Any], qtype: str) -> Callable[..., Any]:
    """Send bytes with a scale for each block; the last block's padding is not written."""

    def encode(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
        blocks = torch.empty(-(-tensor.numel() // GROUP), GROUP, dtype=tensor.dtype)
        blocks.view(-1)[: tensor.numel()] = tensor.reshape(-1)
        return eighths(blocks.view(-1), GROUP)

    return right(func, encode, lambda output, code: from_eighths(output, code, GROUP))


MUTANTS = [
    Mutant("sums_onto_new_memory", ("2.1",)),
    Mutant(
        "sums_large_onto_new_memory",
        ("22.1",),
        because={"22.2": "a bucket of its first step may be as large"},
    ),
    Mutant("range_of_padding", ("13.2",), "compressed(feedback=False, delta=0.9)"),
    Mutant("residual_in_new_memory", ("13.1",), "compressed(delta=0.9)", "builtins:dict"),
    Mutant("SumsOntoNewMemory,period=4,warmup_steps=10", ("14.1",), kind="averager"),
    Mutant("scale_of_padding,func=all_gather,qtype=INT8", ("18.1",), kind="collective"),
]
