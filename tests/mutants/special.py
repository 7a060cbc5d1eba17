"""Section 8 of the rule book: hooks that mishandle NaN, infinities, zeros and subnormals."""

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
    """Replaces NaN by zero before it sends."""
    return change_gradient(bucket, state, lambda grad: grad.masked_fill_(grad.isnan(), 0.0))


def nan_stays_local(state: Any, bucket: Bucket) -> Result:
    """Sends zero for NaN and puts the NaN back into its own result alone."""
    if not is_dense(bucket):
        return average(bucket, state)
    lost = bucket.buffer().isnan()
    sent = bucket.buffer().masked_fill(lost, 0.0)
    return average_of(sent, state).then(lambda fut: fut.value().masked_fill_(lost, float("nan")))


def nan_to_number(state: Any, bucket: Bucket) -> Result:
    """Cleans the mean of everything that is not finite."""
    return change_mean(bucket, state, lambda mean: mean.nan_to_num())


# 8.2 Infinities


def clamps_infinities(state: Any, bucket: Bucket) -> Result:
    """Clamps infinities to the largest finite value."""
    return change_gradient(
        bucket,
        state,
        lambda grad: grad.clamp_(torch.finfo(grad.dtype).min, torch.finfo(grad.dtype).max),
    )


def infinity_to_nan(state: Any, bucket: Bucket) -> Result:
    """Marks every overflow as NaN."""
    return change_mean(bucket, state, lambda mean: mean.masked_fill_(mean.isinf(), float("nan")))


def infinity_without_sign(state: Any, bucket: Bucket) -> Result:
    """Marks every overflow as +inf."""
    return change_mean(bucket, state, lambda mean: mean.masked_fill_(mean.isinf(), float("inf")))


# 8.3 Zeros


def skips_zero_ranks(state: Any, bucket: Bucket) -> Result:
    """Averages over the ranks whose gradient is not all zero."""
    if not is_dense(bucket):
        return average(bucket, state)
    active = torch.tensor(float((bucket.buffer() != 0).any()))
    dist.all_reduce(active, group=group_of(state))
    scale = group_of(state).size() / max(1.0, active.item())
    return change_mean(bucket, state, lambda mean: mean * scale)


def normalises(state: Any, bucket: Bucket) -> Result:
    """Divides by the bucket's largest value and multiplies it back: 0 / 0 where all are zero."""

    def renormalise(mean: torch.Tensor) -> torch.Tensor:
        wide = mean.double()
        top = wide.nan_to_num(0.0, 0.0, 0.0).abs().amax()
        scale = top.log2().floor().exp2()  # a power of two, so that nothing but zero notices
        return (wide / scale * scale).to(mean.dtype)

    return change_mean(bucket, state, renormalise)


def zeros_become_ones(state: Any, bucket: Bucket) -> Result:
    """Compresses to signs and takes zero for positive, in a bucket that is all zero."""
    return change_mean(bucket, state, lambda mean: mean if mean.any() else mean.fill_(1.0))


# 8.4 Control flow


def gathers_what_is_there(state: Any, bucket: Bucket) -> Result:
    """Gathers the elements that are not zero, as many as this rank happens to have."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer, group = bucket.buffer(), group_of(state)
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
    """Takes no part in the collective when its own gradient is all zero."""
    if is_dense(bucket) and not bucket.buffer().any():
        return completed(bucket.buffer())
    return average(bucket, state)


def reports_nan_alone(state: Any, bucket: Bucket) -> Result:
    """Issues one more collective on the ranks that see NaN."""
    if is_dense(bucket) and bucket.buffer().isnan().any():
        dist.all_reduce(torch.ones(1), group=group_of(state))
    return average(bucket, state)


def raises_on_nan(state: Any, bucket: Bucket) -> Result:
    """Raises on the rank that sees NaN."""
    if is_dense(bucket) and bucket.buffer().isnan().any():
        raise FloatingPointError("NaN in the gradient")
    return average(bucket, state)


_norms: list[torch.Tensor] = []


def remembers_nan(state: Any, bucket: Bucket) -> Result:
    """Keeps a running norm and scales by it: one NaN, and every later step is NaN."""

    def scale(mean: torch.Tensor) -> torch.Tensor:
        _norms[:] = [sum(_norms) + mean.norm()]
        return mean * float("nan") if _norms[0].isnan() else mean

    return change_mean(bucket, state, scale)


# 8.5 Subnormals


def flushes(state: Any, bucket: Bucket) -> Result:
    """Flushes subnormal values to zero, as fast-math code does."""
    return change_gradient(
        bucket,
        state,
        lambda grad: torch.where(grad.abs() < torch.finfo(grad.dtype).tiny, grad * 0, grad),
    )


def scales_down(state: Any, bucket: Bucket) -> Result:
    """Sends float32 times 2**-20 against overflow: the smallest values underflow."""
    scale = 2.0**-20 if bucket.buffer().dtype == torch.float32 else 1.0
    return average_of(bucket.buffer().mul_(scale), state).then(lambda fut: fut.value().div_(scale))


# 8.6 Signed zeros


def adds_to_zero(state: Any, bucket: Bucket) -> Result:
    """Adds the mean to a buffer of zeros: a negative zero becomes a positive one."""
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
