"""Hooks that are random, and right on average."""

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import STATE, Bucket, Result, State, completed, dense, gather, sizes, wide


def stochastic_bfloat16(state: State, bucket: Bucket) -> Result:
    """Add 16 random bits below a float32's upper half, and cut off the lower half."""
    buffer = dense(bucket)
    bits = buffer.float().view(torch.int32)
    noise = torch.randint(
        0,
        1 << 16,
        bits.shape,
        dtype=torch.int32,
        generator=state.generator(state.group.rank(), bucket.index()),
    )
    state.count(bucket)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32).bfloat16()
    return completed(torch.stack(gather(rounded, state.group)).float().mean(0).to(buffer.dtype))


def qsgd_int8(state: State, bucket: Bucket, levels: int = 127) -> Result:
    """Gather random signed levels of the bucket's Euclidean norm as int8, with the norms."""
    buffer = dense(bucket)
    x = wide(buffer)
    norm = x.norm().view(1)
    level = x.abs() / torch.where(norm == 0, 1, norm) * levels
    draw = torch.rand(x.shape, generator=state.generator(state.group.rank(), bucket.index()))
    state.count(bucket)
    level = (level.floor() + (draw < level.frac())) * x.sign()
    both = zip(gather(level.to(torch.int8), state.group), gather(norm, state.group), strict=True)
    return completed(
        torch.stack([some.to(x.dtype) * of / levels for some, of in both]).mean(0).to(buffer.dtype)
    )


def qsgd_one_level(state: State, bucket: Bucket) -> Result:
    """Use QSGD with one level.

    Each element is zero or as large as the norm, and most are zero most of the time.
    """
    return qsgd_int8(state, bucket, levels=1)


def terngrad_shared(state: State, bucket: Bucket) -> Result:
    """Sum random int8 levels -1, 0 and 1 of the largest element of all ranks."""
    buffer = dense(bucket)
    x = wide(buffer)
    scale = x.abs().max() if x.numel() else torch.zeros((), dtype=x.dtype)
    # A maximum over ranks may lose a NaN, but no infinity.
    scale = torch.where(scale.isfinite(), scale, torch.inf)
    dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=state.group)
    keep = (
        torch.rand(x.shape, generator=state.generator(state.group.rank(), bucket.index())) * scale
        < x.abs()
    )
    state.count(bucket)
    levels = (x.sign() * keep).to(torch.int8)
    dist.all_reduce(levels, group=state.group)
    return completed((levels.to(x.dtype) * scale / state.group.size()).to(buffer.dtype))


def random_k_scaled(state: State, bucket: Bucket) -> Result:
    """Send each element with probability 1/4, times 4; all ranks send the same elements."""
    buffer = dense(bucket)
    mask = torch.rand(buffer.shape, generator=state.generator(bucket.index())) < state.setting
    state.count(bucket)
    values = buffer[mask] / (state.setting * state.group.size())
    work = dist.all_reduce(values, group=state.group, async_op=True)
    return work.get_future().then(
        lambda fut: torch.zeros_like(buffer).masked_scatter_(mask, fut.value()[0])
    )


def half_and_seldom_the_rest(state: State, bucket: Bucket) -> Result:
    """Always send half of each element, and seldom the other half, scaled up.

    The other half is sent with a small probability p, times 1/p. All ranks draw the same elements.
    """
    buffer = dense(bucket)
    seldom = torch.rand(buffer.shape, generator=state.generator(bucket.index())) < state.setting
    state.count(bucket)
    work = dist.all_reduce(buffer.div_(2 * state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(
        lambda fut: torch.where(seldom, fut.value()[0] * (1 + 1 / state.setting), fut.value()[0])
    )


def falling_share(state: State, bucket: Bucket) -> Result:
    """Send a share of each parameter's elements, at least one of them, and of an embedding's rows.

    The share is 1/2 in the first 150 steps, halves every 150 steps, and ends at 1/64.
    """
    group = state.group
    buffer = bucket.buffer()
    numbers = state.generator(group.rank(), bucket.index())
    share = max(1 / 64, 0.5 ** (1 + state.step // 150))
    state.count(bucket)
    if buffer.layout != torch.strided:
        own = buffer.coalesce()
        kept = torch.rand(len(own.values()), generator=numbers) < share
        rows = torch.sparse_coo_tensor(
            own.indices()[:, kept], own.values()[kept] / share, own.shape
        )
        work = dist.all_reduce(rows.div_(group.size()), group=group, async_op=True)
        return work.get_future().then(lambda fut: fut.value()[0])
    mask = torch.zeros_like(buffer)
    for part in mask.split(sizes(bucket)):
        numel = part.numel()
        count = max(1, round(share * numel))
        part[torch.randperm(numel, generator=numbers)[:count]] = numel / count
    work = dist.all_reduce(buffer * mask / group.size(), group=group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


# Sections for another rounding or selection in the same frame.
_DRAWS = ("3", "10", "13")

RIGHT = [
    Right("qsgd_int8", "unbiased(ratio=0.27)", STATE),
    Right("terngrad_shared", "unbiased(ratio=0.27)", STATE, sections=_DRAWS),
    Right("random_k_scaled", "unbiased", STATE, sections=_DRAWS),
    Right("stochastic_bfloat16", "unbiased", STATE, sections=_DRAWS),
    Right("falling_share", "unbiased", STATE, sections=("2", "3", "13", "23")),
    # With this seed the smallest parameter is never drawn: every step has the same half, 96 times.
    Right("half_and_seldom_the_rest", "unbiased", STATE + ",setting=0.02,seed=6", sections=_DRAWS),
    # Its errors are seldom and large, and with this seed even larger.
    Right("qsgd_one_level", "unbiased", STATE + ",seed=3304", sections=_DRAWS),
]
