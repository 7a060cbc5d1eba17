"""Mutants of the claim ``rounded(float16)``, with a defect beside the rounding."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    change_gradient,
    change_mean,
    group_of,
    is_dense,
    sum_of,
)


def half_undivided(state: Any, bucket: Bucket) -> Result:
    """Sum in float16 without dividing."""
    buffer = bucket.buffer()
    return sum_of(buffer.to(torch.float16, copy=True), state).then(
        lambda fut: fut.value().to(buffer.dtype)
    )


def half_of_a_half(state: Any, bucket: Bucket) -> Result:
    """Round to bfloat16 before rounding to float16."""
    return change_gradient(bucket, state, lambda grad: grad.bfloat16().half()).then(
        lambda fut: fut.value().to(bucket.buffer().dtype)
    )


def half_scaled_up(state: Any, bucket: Bucket) -> Result:
    """Scale by 64 before rounding to float16, so that values above 1,000 overflow."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    return average_of(buffer.mul(64).half(), state).then(
        lambda fut: fut.value().to(buffer.dtype).div_(64)
    )


def mean_through_half(state: Any, bucket: Bucket) -> Result:
    """Reduce in full precision, and round the mean to float16."""
    return change_mean(bucket, state, lambda mean: mean.half().to(mean.dtype))


def sends_what_it_was(state: Any, bucket: Bucket) -> Result:
    """Send the rounded values in the bucket's own dtype."""
    return change_gradient(
        bucket,
        state,
        lambda grad: (
            grad.div_(group_of(state).size()).half().to(grad.dtype).mul_(group_of(state).size())
        ),
    )


_FLOAT16 = "rounded(float16)"

MUTANTS = [
    Mutant("half_undivided", ("2.1",), _FLOAT16),
    Mutant("half_of_a_half", ("2.2",), _FLOAT16),
    Mutant("half_scaled_up", ("2.3",), _FLOAT16),
    Mutant("sends_what_it_was", ("13.7",), "rounded(float16, ratio=0.5)"),
    Mutant("mean_through_half", ("2.2", "8.5"), because={"8.5": "the rounding loses subnormals"}),
]
