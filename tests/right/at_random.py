"""Random, and right on average."""

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import STATE, Bucket, Result, State, completed, dense, gather, wide


def stochastic_bfloat16(state: State, bucket: Bucket) -> Result:
    """Adds 16 random bits below a float32's upper half and cuts them off."""
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
    """Signed levels of the bucket's Euclidean norm, gathered as int8 beside the norms."""
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
    """The same with one level: each element is zero or as large as the norm, and most are zero most of the time."""
    return qsgd_int8(state, bucket, levels=1)


def terngrad_shared(state: State, bucket: Bucket) -> Result:
    """The largest element of all ranks is the scale of all: int8 levels -1, 0 and 1 are summed on the way."""
    buffer = dense(bucket)
    x = wide(buffer)
    scale = x.abs().max() if x.numel() else torch.zeros((), dtype=x.dtype)
    scale = torch.where(
        scale.isfinite(), scale, torch.inf
    )  # a maximum over ranks may lose a NaN, but no infinity
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
    """Each element with probability 1/4, times 4; the same elements on all ranks."""
    buffer = dense(bucket)
    mask = torch.rand(buffer.shape, generator=state.generator(bucket.index())) < state.setting
    state.count(bucket)
    values = buffer[mask] / (state.setting * state.group.size())
    work = dist.all_reduce(values, group=state.group, async_op=True)
    return work.get_future().then(
        lambda fut: torch.zeros_like(buffer).masked_scatter_(mask, fut.value()[0])
    )


def half_and_seldom_the_rest(state: State, bucket: Bucket) -> Result:
    """Half of each element always, and the other half with a small probability, times what makes up for it; the same on all ranks."""
    buffer = dense(bucket)
    seldom = torch.rand(buffer.shape, generator=state.generator(bucket.index())) < state.setting
    state.count(bucket)
    work = dist.all_reduce(buffer.div_(2 * state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(
        lambda fut: torch.where(seldom, fut.value()[0] * (1 + 1 / state.setting), fut.value()[0])
    )


_DRAWS = ("3", "10", "13")  # rounds or leaves out otherwise, in the same frame

RIGHT = [
    Right("qsgd_int8", "unbiased(ratio=0.27)", STATE),
    Right("terngrad_shared", "unbiased(ratio=0.27)", STATE, sections=_DRAWS),
    Right("random_k_scaled", "unbiased", STATE, sections=_DRAWS),
    Right("stochastic_bfloat16", "unbiased", STATE, sections=_DRAWS),
    # One whose smallest parameter is not drawn for as long as a run is: the same half of it, 96 times.
    Right("half_and_seldom_the_rest", "unbiased", STATE + ",setting=0.02,seed=6", sections=_DRAWS),
    # One of which errors are seldom and large, and with this seed the more so.
    Right("qsgd_one_level", "unbiased", STATE + ",seed=3304", sections=_DRAWS),
]
