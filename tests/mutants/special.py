"""Mutants of section 8: hooks that mishandle NaN, infinities, zeros and subnormals."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import ZEROS, Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    change_gradient,
    change_mean,
    completed,
    group_of,
    is_dense,
)

# 8.1 NaN


def nan_to_zero(state: Any, bucket: Bucket) -> Result:
    """Replace NaN by zero before sending."""
    return change_gradient(bucket, state, lambda grad: grad.masked_fill_(grad.isnan(), 0.0))


def nan_stays_local(state: Any, bucket: Bucket) -> Result:
    """Send zero for NaN, and restore the NaN on its own rank only."""
    if not is_dense(bucket):
        return average(bucket, state)
    lost = bucket.buffer().isnan()
    sent = bucket.buffer().masked_fill(lost, 0.0)
    return average_of(sent, state).then(lambda fut: fut.value().masked_fill_(lost, float("nan")))


def nan_to_number(state: Any, bucket: Bucket) -> Result:
    """Replace NaN and infinities in the mean by finite values."""
    return change_mean(bucket, state, lambda mean: mean.nan_to_num())


# 8.2 Infinities


def clamps_infinities(state: Any, bucket: Bucket) -> Result:
    """Clamp infinities to the largest finite value."""
    return change_gradient(
        bucket,
        state,
        lambda grad: grad.clamp_(torch.finfo(grad.dtype).min, torch.finfo(grad.dtype).max),
    )


def infinity_to_nan(state: Any, bucket: Bucket) -> Result:
    """Replace infinities in the mean by NaN."""
    return change_mean(bucket, state, lambda mean: mean.masked_fill_(mean.isinf(), float("nan")))


def infinity_without_sign(state: Any, bucket: Bucket) -> Result:
    """Replace infinities in the mean by +inf."""
    return change_mean(bucket, state, lambda mean: mean.masked_fill_(mean.isinf(), float("inf")))


# 8.3 Zeros


def skips_zero_ranks(state: Any, bucket: Bucket) -> Result:
    """Average over the ranks whose gradient is not all zero."""
    if not is_dense(bucket):
        return average(bucket, state)
    active = torch.tensor(float((bucket.buffer() != 0).any()))
    dist.all_reduce(active, group=group_of(state))
    scale = group_of(state).size() / max(1.0, active.item())
    return change_mean(bucket, state, lambda mean: mean * scale)


def normalises(state: Any, bucket: Bucket) -> Result:
    """Divide by the bucket's largest value and multiply it back, which is 0 / 0 for zeros."""

    def renormalise(mean: torch.Tensor) -> torch.Tensor:
        wide = mean.double()
        top = wide.nan_to_num(0.0, 0.0, 0.0).abs().amax()
        scale = top.log2().floor().exp2()  # a power of two: only zeros change
        return (wide / scale * scale).to(mean.dtype)

    return change_mean(bucket, state, renormalise)


def zeros_become_ones(state: Any, bucket: Bucket) -> Result:
    """Return ones for a bucket of zeros."""
    return change_mean(bucket, state, lambda mean: mean if mean.any() else mean.fill_(1.0))


# 8.4 Control flow


def gathers_what_is_there(state: Any, bucket: Bucket) -> Result:
    """Gather the nonzero elements, whose number differs between ranks."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    group = group_of(state)
    there = buffer.nonzero().squeeze(1)
    places, values = (
        [torch.empty_like(mine) for _ in range(group.size())] for mine in (there, buffer)
    )
    dist.all_gather(places, there, group=group)
    dist.all_gather([value[: len(there)] for value in values], buffer[there], group=group)
    total = torch.zeros_like(buffer)
    for place, value in zip(places, values, strict=True):
        total.index_add_(0, place, value[: len(place)])
    return completed(total.div_(group.size()))


def skips_zeros(state: Any, bucket: Bucket) -> Result:
    """Skip the collective if this rank's gradient is all zero."""
    if is_dense(bucket) and not bucket.buffer().any():
        return completed(bucket.buffer())
    return average(bucket, state)


def reports_nan_alone(state: Any, bucket: Bucket) -> Result:
    """Issue one more collective on ranks with a NaN."""
    if is_dense(bucket) and bucket.buffer().isnan().any():
        dist.all_reduce(torch.ones(1), group=group_of(state))
    return average(bucket, state)


def raises_on_nan(state: Any, bucket: Bucket) -> Result:
    """Raise on ranks with a NaN."""
    if is_dense(bucket) and bucket.buffer().isnan().any():
        raise FloatingPointError("NaN in the gradient")
    return average(bucket, state)


_norms: list[torch.Tensor] = []


def remembers_nan(state: Any, bucket: Bucket) -> Result:
    """Scale by a running norm, so that one NaN makes every later step NaN."""

    def scale(mean: torch.Tensor) -> torch.Tensor:
        _norms[:] = [sum(_norms) + mean.norm()]
        return mean * float("nan") if _norms[0].isnan() else mean

    return change_mean(bucket, state, scale)


# 8.5 Subnormals


def flushes(state: Any, bucket: Bucket) -> Result:
    """Flush subnormal values to zero, as fast-math code does."""
    return change_gradient(
        bucket,
        state,
        lambda grad: torch.where(grad.abs() < torch.finfo(grad.dtype).tiny, grad * 0, grad),
    )


def scales_down(state: Any, bucket: Bucket) -> Result:
    """Send float32 times 2**-20 against overflow, so that the smallest values underflow."""
    scale = 2.0**-20 if bucket.buffer().dtype == torch.float32 else 1.0
    return average_of(bucket.buffer().mul_(scale), state).then(lambda fut: fut.value().div_(scale))


# 8.6 Signed zeros


def adds_to_zero(state: Any, bucket: Bucket) -> Result:
    """Add the mean to zeros, so that a negative zero becomes positive."""
    return change_mean(bucket, state, lambda mean: torch.zeros_like(mean).add_(mean))


MUTANTS = [
    Mutant("nan_to_zero", ("8.1",)),
    Mutant("nan_stays_local", ("8.1",)),
    Mutant("nan_to_number", ("8.1", "8.2"), because={"8.2": "infinities are not finite either"}),
    Mutant("clamps_infinities", ("8.2",)),
    Mutant("infinity_to_nan", ("8.2",)),
    Mutant("infinity_without_sign", ("8.2",)),
    Mutant("skips_zero_ranks", ("8.3",), because=ZEROS),
    Mutant("normalises", ("8.3",)),
    Mutant("zeros_become_ones", ("8.3",)),
    Mutant("skips_zeros", ("8.4",), hangs=True, because=ZEROS),
    Mutant(
        "gathers_what_is_there",
        ("8.4",),
        hangs=True,
        because={**ZEROS, "3.2": "a unit that is never active has zeros"},
    ),
    Mutant("reports_nan_alone", ("8.4",)),
    Mutant("raises_on_nan", ("8.4",)),
    Mutant("remembers_nan", ("8.4",)),
    Mutant("flushes", ("8.5",)),
    Mutant("scales_down", ("8.5",)),
    Mutant("adds_to_zero", ("8.6",)),
]
