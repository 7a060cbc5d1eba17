"""Mutants of section 3: hooks that let replicas drift apart, or runs differ."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_hook,
    completed,
    gather,
    group_of,
    is_dense,
)


def _from_base(bases: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return base + sum(part - base) / W: the mean, with a last bit that depends on the base."""
    mean = sum(parts[1:], parts[0]) / len(parts)
    moved = bases + sum(part - bases for part in parts) / len(parts)
    return torch.where(
        mean.isfinite() & (mean != 0) & (mean.abs() > torch.finfo(mean.dtype).tiny), moved, mean
    )


# 3.1 Ranks


def starts_from_own(state: Any, bucket: Bucket) -> Result:
    """Add the differences to this rank's own gradient, so that ranks round differently."""
    if not is_dense(bucket):
        return average(bucket, state)
    return completed(_from_base(bucket.buffer(), gather(bucket.buffer(), state)))


def adds_own_last(state: Any, bucket: Bucket) -> Result:
    """Add this rank's own gradient last, so that three ranks have three orders."""
    if not is_dense(bucket):
        return average(bucket, state)
    parts = [part / group_of(state).size() for part in gather(bucket.buffer(), state)]
    own = parts.pop(group_of(state).rank())
    return completed(sum(parts[1:], parts[0]) + own if parts else own)


def owner_keeps_unrounded(state: Any, bucket: Bucket) -> Result:
    """Round to float16 as claimed, but keep the unrounded mean on rank 0."""
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, state)
    parts = [
        part.to(buffer.dtype) / group_of(state).size() for part in gather(buffer.half(), state)
    ]
    mean = sum(parts[1:], parts[0])
    return completed(mean if group_of(state).rank() == 0 else mean.half().to(buffer.dtype))


# 3.2 Models


def drifts_in_later_buckets(state: Any, bucket: Bucket) -> Result:
    """Add the differences to this rank's own gradient in all but the first bucket."""
    return starts_from_own(state, bucket) if bucket.index() > 0 else average(bucket, state)


def initialises_by_rank(model: Any, process_group: Any, rank: int) -> tuple[Any, Any]:
    """Change the parameters by rank in the set-up, after DDP has made them equal."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return process_group, average_hook


# 3.3 Runs


def _draw_from(seed: int, bucket: Bucket, state: Any) -> Result:
    """Average with a base that is drawn for each element from the first and the last rank.

    All ranks use the draws of rank 0.
    """
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, state)
    drawn = torch.randint(2, buffer.shape, generator=torch.Generator().manual_seed(seed % 2**63))
    dist.broadcast(drawn, group=group_of(state), src=dist.get_global_rank(group_of(state), 0))
    parts = gather(buffer, state)
    return completed(_from_base(torch.where(drawn == 0, parts[0], parts[-1]), parts))


def seeds_from_system(state: Any, bucket: Bucket) -> Result:
    """Seed the draws with the system's random numbers."""
    return _draw_from(int.from_bytes(os.urandom(8), "little"), bucket, state)


def seeds_from_clock(state: Any, bucket: Bucket) -> Result:
    """Seed the draws with the clock."""
    return _draw_from(time.time_ns(), bucket, state)


def seeds_from_pid(state: Any, bucket: Bucket) -> Result:
    """Seed the draws with the process id."""
    return _draw_from(os.getpid(), bucket, state)


MUTANTS = [
    Mutant(
        "starts_from_own",
        ("3.1",),
        because={
            "2.3": "at three ranks, a base far from the mean costs more precision than the bound"
        },
    ),
    Mutant("adds_own_last", ("3.1",), worlds=(2, 3)),
    Mutant("owner_keeps_unrounded", ("3.1",), claims="rounded(float16)"),
    Mutant("drifts_in_later_buckets", ("3.2",)),
    Mutant("initialises_by_rank", ("3.2",), setup=True),
    Mutant("seeds_from_system", ("3.3",)),
    Mutant("seeds_from_clock", ("3.3",)),
    Mutant("seeds_from_pid", ("3.3",)),
]
