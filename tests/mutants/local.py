"""Mutants of rule 13.5, and of other rules under its claim: means of some ranks' gradients."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    completed,
    gather,
    group_of,
    is_dense,
    kept,
    step_number,
)


def _refuse_sparse(bucket: Bucket) -> None:
    """Raise if the gradient is sparse.

    A sparse mean would have other weights than the dense means of its step.
    """
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")


def _with_previous(
    state: Any, bucket: Bucket, mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Result:
    """Mix this rank's gradient with the gradient of the previous rank."""
    _refuse_sparse(bucket)
    group = group_of(state)
    previous = gather(bucket.buffer(), state)[(group.rank() - 1) % group.size()]
    return completed(mix(bucket.buffer(), previous))


def _three_quarters(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return three quarters of ``own`` plus a quarter of ``other``: right."""
    return own.mul_(0.75).add_(other, alpha=0.25)


def never_halves(state: Any, bucket: Bucket) -> Result:
    """Add a neighbour's gradient without halving the sum."""
    return _with_previous(state, bucket, torch.add)


def stays_alone_on_errors(state: Any, bucket: Bucket) -> Result:
    """Return the local gradient if the neighbour's cannot be received."""
    _refuse_sparse(bucket)
    try:
        return _with_previous(state, bucket, lambda own, other: (own + other) / 2)
    except RuntimeError:
        return completed(bucket.buffer())


def own_left_out(state: Any, bucket: Bucket) -> Result:
    """Return a neighbour's gradient only."""
    return _with_previous(state, bucket, lambda own, other: other)


def everyone_with_rank_0(state: Any, bucket: Bucket) -> Result:
    """Average every rank with rank 0, which then counts more than the others."""
    _refuse_sparse(bucket)
    return completed((bucket.buffer() + gather(bucket.buffer(), state)[0]) / 2)


def weights_of_other_ranks(state: Any, bucket: Bucket) -> Result:
    """Weigh a rank's own gradient by its rank, so that ranks count unequally."""
    weight = 0.25 if group_of(state).rank() == 0 else 0.75
    return _with_previous(state, bucket, lambda own, other: own * weight + other * (1 - weight))


def weights_of_elements(state: Any, bucket: Bucket) -> Result:
    """Mix the first half of a bucket, and leave the second half local."""

    def mix(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        half = own.numel() // 2
        own[:half] = _three_quarters(own[:half].clone(), other[:half])
        return own

    return _with_previous(state, bucket, mix)


def weights_beyond_one(state: Any, bucket: Bucket) -> Result:
    """Subtract a neighbour's gradient from twice the own one, a weight below 0."""
    return _with_previous(state, bucket, lambda own, other: 2 * own - other)


def neighbour_of_last_step(state: Any, bucket: Bucket) -> Result:
    """Mix with the neighbour's gradient of the previous step."""

    def mix(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        key = (bucket.index(), own.numel())
        before = kept.get(key, other)
        kept[key] = other
        return _three_quarters(own, before)

    return _with_previous(state, bucket, mix)


def alone_is_halved(state: Any, bucket: Bucket) -> Result:
    """Average pairs of ranks, and halve the gradient of an odd rank out."""
    _refuse_sparse(bucket)
    parts = gather(bucket.buffer(), state)
    rank = group_of(state).rank()
    other = parts[rank ^ 1] if rank ^ 1 < len(parts) else torch.zeros_like(parts[rank])
    return completed((parts[rank] + other) / 2)


def neighbour_by_global_rank(state: Any, bucket: Bucket) -> Result:
    """Look up the neighbour in the group by the global rank."""
    _refuse_sparse(bucket)
    parts = gather(bucket.buffer(), state)
    other = parts[(dist.get_rank() - 1) % len(parts)]
    return completed(_three_quarters(bucket.buffer(), other))


def neighbour_without_nan(state: Any, bucket: Bucket) -> Result:
    """Replace NaN by zero in the result."""
    return _with_previous(
        state,
        bucket,
        lambda own, other: _three_quarters(own, other).nan_to_num_(0, math.inf, -math.inf),
    )


def local_is_everyone(state: Any, bucket: Bucket) -> Result:
    """Claim that replicas drift apart, and average over all ranks."""
    return average(bucket, state)


def local_too_soon(state: Any, bucket: Bucket) -> Result:
    """Claim to average over all ranks in the first two steps, and do so in one step."""
    return average(bucket, state) if step_number(bucket) < 1 else completed(bucket.buffer())


def local_too_late(state: Any, bucket: Bucket) -> Result:
    """Claim to average over all ranks in the first two steps, and do so in three steps."""
    return average(bucket, state) if step_number(bucket) < 3 else completed(bucket.buffer())


_errors = dict.fromkeys(("12.1", "12.3"), "it hides every kind of error")

# 12.1 Collectives that fail in some steps only


class Schedule:
    """A rank's group and steps; the mean is due once in ``period`` steps."""

    def __init__(self, process_group: dist.ProcessGroup, period: int = 4) -> None:
        self.group = process_group
        self.period = period
        self.step = 0

    def is_due(self, bucket: Bucket) -> bool:
        """Whether the mean is due; to be called once for each bucket."""
        is_due = self.step % self.period == self.period - 1
        self.step += bucket.is_last()
        return is_due


def stays_local_on_failure(state: Schedule, bucket: Bucket) -> Result:
    """Leave the mean to the next period if it fails."""
    own = bucket.buffer()
    if state.is_due(bucket):
        with contextlib.suppress(RuntimeError):
            mean = own / state.group.size()
            dist.all_reduce(mean, group=state.group)
            return completed(mean)
    return completed(own)


def keeps_own_half_on_failure(state: Schedule, bucket: Bucket) -> Result:
    """Mix with the mean of all ranks; take a failed one for the rank's own gradients."""
    own = bucket.buffer()
    mean = own.clone()
    if state.is_due(bucket):
        try:
            dist.all_reduce(mean, group=state.group)
            mean /= state.group.size()
        except RuntimeError:
            mean = own
    return completed((own + mean) / 2)


MUTANTS = [
    *(
        Mutant(name, ("13.5",), "local")
        for name in (
            "never_halves",
            "own_left_out",
            "everyone_with_rank_0",
            "weights_of_other_ranks",
        )
    ),
    *(
        Mutant(name, ("13.5",), "local")
        for name in ("weights_of_elements", "weights_beyond_one", "neighbour_of_last_step")
    ),
    Mutant(
        "stays_alone_on_errors", ("12.2", "12.1", "12.3"), "local", because=_errors, worlds=(2, 3)
    ),
    Mutant("alone_is_halved", ("2.6",), "local", worlds=(2, 3)),
    Mutant("neighbour_by_global_rank", ("2.7",), "local"),
    Mutant("neighbour_without_nan", ("8.1",), "local"),
    Mutant("local_is_everyone", ("2.10",), "local", worlds=(2, 3)),
    *(Mutant(name, ("13.4",), "local, warmup(2)") for name in ("local_too_soon", "local_too_late")),
    Mutant("stays_local_on_failure", ("12.1",), "local(period=4)", state=f"{__name__}:Schedule"),
    Mutant("stays_local_on_failure", ("12.1",), "local(period=7)", f"{__name__}:Schedule,period=7"),
    Mutant("keeps_own_half_on_failure", ("12.1",), "local", state=f"{__name__}:Schedule"),
]
