"""Mutants of rule 10.3 whose equal buckets of one dtype share memory while they are under way."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, group_of, is_dense, kept

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _mean_in_scratch(bucket: Bucket, state: Any, dtype: torch.dtype) -> Result:
    """Sum in memory that is kept by dtype and size, and copy the mean into the bucket."""
    buffer = bucket.buffer()
    key = (buffer.dtype, buffer.numel())
    if key not in kept:
        kept[key] = torch.empty_like(buffer, dtype=dtype)
    group = group_of(state)
    work = dist.all_reduce(kept[key].copy_(buffer), group=group, async_op=True)
    return work.get_future().then(lambda fut: buffer.copy_(fut.value()[0].div_(group.size())))


def halves_in_scratch(state: Any, bucket: Bucket) -> Result:
    """Sum half precision in float32, in memory that buckets of one dtype and size share."""
    if is_dense(bucket) and bucket.buffer().dtype in _WIDER:
        return _mean_in_scratch(bucket, state, torch.float32)
    return average(bucket, state)


def float64_in_scratch(state: Any, bucket: Bucket) -> Result:
    """Sum float64 in memory that buckets of one size share."""
    if is_dense(bucket) and bucket.buffer().dtype == torch.float64:
        return _mean_in_scratch(bucket, state, torch.float64)
    return average(bucket, state)


def large_ones_in_scratch(state: Any, bucket: Bucket) -> Result:
    """Sum large buckets in memory that those of one size share."""
    if is_dense(bucket) and bucket.buffer().numel() >= 1 << 13:
        buffer = bucket.buffer()
        return _mean_in_scratch(bucket, state, _WIDER.get(buffer.dtype, buffer.dtype))
    return average(bucket, state)


MUTANTS = [
    Mutant("halves_in_scratch", ("10.3",)),
    Mutant("float64_in_scratch", ("10.3",)),
    Mutant("large_ones_in_scratch", ("10.3",)),
]
