"""Mutants of rule 23.1: random rounding within a range that is taken from the steps before."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    group_of,
    is_dense,
    pieces_of,
    seeded,
    step_number,
)

Hook = Callable[[Any, Bucket], Result]

_LEVELS = 127


def _round_within(
    piece: torch.Tensor, limit: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Round to 127 levels of either sign at random, and cut off values beyond the limit."""
    unit = limit.clamp(min=1e-30).double() / _LEVELS
    draws = torch.rand(piece.shape, generator=generator, dtype=torch.float64)
    rounded = (piece.double() / unit + draws).floor().clamp(-_LEVELS, _LEVELS)
    return (rounded * unit).to(piece.dtype)


def _takes(bucket: Bucket) -> bool:
    buffer = bucket.buffer() if is_dense(bucket) else None
    return buffer is not None and buffer.is_floating_point() and bool(buffer.isfinite().all())


def largest_of_steps_before(window: int) -> Hook:
    """Take the largest magnitude of some steps before, as delayed scaling in 8 bits does."""
    histories: dict[Any, list[torch.Tensor]] = {}

    def hook(state: Any, bucket: Bucket) -> Result:
        if not _takes(bucket):
            return average(bucket, state)
        step = step_number(bucket)
        rank = group_of(state).rank()
        for number, parameter in enumerate(bucket.parameters()):
            piece = pieces_of(bucket)[number]
            if not piece.numel():
                continue
            size = piece.abs().amax()
            history = histories.setdefault(parameter, [])
            limit = torch.stack(history).amax() if history else size
            history.append(size.clone())
            del history[:-window]
            if not float(limit):
                limit = size
            piece.copy_(_round_within(piece, limit, seeded(step, rank, bucket.index(), number)))
        return average(bucket, state)

    return hook


def largest_of_all_ranks_before(state: Any, bucket: Bucket) -> Result:
    """Take twice the largest magnitude of all ranks in the step before."""
    if not _takes(bucket):
        return average(bucket, state)
    group = group_of(state)
    buffer = bucket.buffer()
    key = tuple(bucket.parameters())
    largest = buffer.abs().amax().reshape(1)
    limit = 2 * _largest.get(key, largest)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    if float(largest):
        _largest[key] = largest
    generator = seeded(step_number(bucket), group.rank(), bucket.index())
    buffer.copy_(_round_within(buffer, limit, generator))
    return average(bucket, state)


_largest: dict[Any, torch.Tensor] = {}


def shrinks_to_median(state: Any, bucket: Bucket) -> Result:
    """Shrink a bucket to twice its median length so far, and send a random half."""
    if not _takes(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    lengths = _lengths.setdefault(tuple(bucket.parameters()), [])
    length = buffer.norm()
    if float(length):
        lengths.append(length.clone())
        usual = torch.stack(lengths[-30:]).median()
        buffer.mul_((2 * usual / length).clamp(max=1))
    generator = seeded(step_number(bucket), group_of(state).rank(), bucket.index())
    buffer.mul_(2 * torch.randint(2, buffer.shape, generator=generator))
    return average(bucket, state)


_lengths: dict[Any, list[torch.Tensor]] = {}

MUTANTS = [
    Mutant("largest_of_steps_before,window=16", ("23.1",), "unbiased"),
    Mutant("largest_of_all_ranks_before", ("23.1",), "unbiased"),
    Mutant("shrinks_to_median", ("23.1",), "unbiased"),
]
