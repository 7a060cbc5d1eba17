"""Right hooks that round, divide or fail in ways of their own."""

import math
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import FEEDBACK, STATE, Bucket, Residuals, Result, State, dense, wide


def _group_of(state: Any) -> dist.ProcessGroup:
    return state if state is not None else dist.group.WORLD


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Result:
    return (
        dist.all_reduce(tensor, group=group, async_op=True)
        .get_future()
        .then(lambda fut: fut.value()[0])
    )


# Factors before and after the sum


def square_roots(state: Any, bucket: Bucket) -> Result:
    """Divide by the square root of the group's size before the sum and after it."""
    group = _group_of(state)
    root = math.sqrt(group.size())
    return _sum(bucket.buffer().div_(root), group).then(lambda fut: fut.value().div_(root))


def reciprocal_square_roots(state: Any, bucket: Bucket) -> Result:
    """Multiply by the rounded reciprocal of the square root before the sum and after it."""
    group = _group_of(state)
    factor = 1 / math.sqrt(group.size())
    return _sum(bucket.buffer().mul_(factor), group).then(lambda fut: fut.value().mul_(factor))


def third_and_rest(state: Any, bucket: Bucket) -> Result:
    """Divide by the cube root of the group's size before the sum, and by its square after it."""
    group = _group_of(state)
    root = group.size() ** (1 / 3)
    return _sum(bucket.buffer().div_(root), group).then(lambda fut: fut.value().div_(root**2))


def powers_of_two(state: Any, bucket: Bucket) -> Result:
    """Divide by a power of two before the sum and by the rest after it, as FSDP does."""
    group = _group_of(state)
    size = group.size()
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    after = size / before
    return _sum(bucket.buffer().div_(before), group).then(lambda fut: fut.value().div_(after))


# Errors that name the collective


def wraps_errors(state: Any, bucket: Bucket) -> Result:
    """Raise an error of its own from that of the collective."""
    group = _group_of(state)
    place = f"bucket {bucket.index()} on rank {group.rank()}"
    try:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    except RuntimeError as error:
        raise ValueError(f"cannot average {place}") from error

    def mean(future: torch.futures.Future) -> torch.Tensor:
        try:
            return future.value()[0].div_(group.size())
        except RuntimeError as error:
            raise RuntimeError(f"all_reduce of {place} failed: {error}") from error

    return work.get_future().then(mean)


# NaN and infinities by flags


def flags_beside_values(state: Any, bucket: Bucket) -> Result:
    """Send finite values, and beside them where a rank has NaN or an infinity of either sign."""
    group = _group_of(state)
    buffer = dense(bucket)
    size = buffer.numel()
    bad = torch.cat([buffer.isnan(), buffer == torch.inf, buffer == -torch.inf]).to(buffer.dtype)
    finite = torch.where(buffer.isfinite(), buffer, torch.zeros_like(buffer))
    sent = torch.cat([finite.div_(group.size()), bad])

    def unpack(future: torch.futures.Future) -> torch.Tensor:
        mean, nan, above, below = future.value().split(size)
        mean = mean.masked_fill(above > 0, torch.inf).masked_fill(below > 0, -torch.inf)
        return mean.masked_fill((nan > 0) | ((above > 0) & (below > 0)), torch.nan)

    return _sum(sent, group).then(unpack)


# Residuals of experts that rest


class TopHalf:
    """Half of the elements with feedback; ranks agree first on the parameters that nobody used."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.group = process_group if process_group is not None else dist.group.WORLD
        self.residuals = Residuals()

    def new_scale(self, factor: float) -> None:
        """Take the residuals to the units of a new loss scale."""
        for residual in self.residuals.kept.values():
            residual.mul_(factor)


def waits_for_experts(state: TopHalf, bucket: Bucket) -> Result:
    """Send nothing of parameters whose gradients are zero on all ranks; keep their residuals."""
    buffer = dense(bucket)
    if bucket.parameters()[0].is_complex():
        raise TypeError("complex gradients are not supported")
    sizes = [parameter.numel() for parameter in bucket.parameters()]
    used = torch.tensor([bool(part.any()) for part in buffer.split(sizes)], dtype=torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=state.group)
    kept = state.residuals.of(bucket)
    value = buffer + kept
    sent = torch.zeros_like(value)
    for part, into, flag in zip(value.split(sizes), sent.split(sizes), used, strict=True):
        if flag:
            largest = part.abs().topk((part.numel() + 1) // 2).indices
            into[largest] = part[largest]
    state.residuals.keep(bucket, value - sent)
    buffer.copy_(sent)
    return _sum(buffer.div_(state.group.size()), state.group)


# Steps that overflow


def dense_after_an_overflow(state: State, bucket: Bucket) -> Result:
    """Send half of the elements with feedback; if a step overflows on a rank, keep all residuals,
    and send everything in the three steps after it.
    """
    buffer = dense(bucket)
    key = bucket.parameters()[0]
    is_finite = buffer.isfinite().all().to(torch.uint8)
    dist.all_reduce(is_finite, op=dist.ReduceOp.MIN, group=state.group)
    if not is_finite:
        _DENSE[key] = 3
        return _sum(buffer.div_(state.group.size()), state.group)
    value = wide(buffer) + state.residuals.of(bucket)
    sent = value.clone()
    if _DENSE.get(key, 0):
        _DENSE[key] -= 1
    elif value.numel() > 1:
        sent[value.abs().topk(value.numel() // 2, largest=False).indices] = 0
    buffer.copy_(sent)
    state.residuals.keep(bucket, value - buffer)
    return _sum(buffer.div_(state.group.size()), state.group)


_DENSE: dict[torch.nn.Parameter, int] = {}


RIGHT = [
    Right("square_roots", "scaled"),
    Right("reciprocal_square_roots", "scaled", sections=("1", "2", "3", "6", "8", "10", "12")),
    Right("third_and_rest", "scaled", sections=("1", "2", "3", "6", "8", "10", "12")),
    Right("powers_of_two"),
    Right("wraps_errors", sections=("1", "2", "12")),
    Right("flags_beside_values", sections=("1", "2", "8", "12")),
    Right(
        "dense_after_an_overflow",
        FEEDBACK,
        STATE,
        sections=("1", "2", "8", "11", "13"),
    ),
    Right(
        "waits_for_experts",
        "compressed(delta=0.25), keeps_unused, rescaled(call=new_scale)",
        f"{__name__}:TopHalf",
    ),
]
