"""Mutants of section 20: hooks that are right with four ranks, and wrong with a thousand."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, group_of, is_dense, sum_of

_SHARES = (1.0, 1 / 2, 1 / 3, 1 / 4)


def shares_from_a_table(state: Any, bucket: Bucket) -> Result:
    """Look up the factor in a table for up to four ranks, at any world size."""
    size = group_of(state).size()
    return sum_of(bucket.buffer(), state).then(
        lambda fut: fut.value().div_(size) if size <= 4 else fut.value().mul_(_SHARES[size % 4])
    )


def sums_in_half_first(state: Any, bucket: Bucket) -> Result:
    """Sum in float16 before the division, so that the sum overflows."""
    buffer = bucket.buffer()
    size = group_of(state).size()
    if not is_dense(bucket):
        return average(bucket, state)
    return sum_of(buffer.to(torch.float16, copy=True), state).then(
        lambda fut: fut.value().to(buffer.dtype).div_(size)
    )


def divides_before_half(state: Any, bucket: Bucket) -> Result:
    """Divide before rounding to float16, so that the quotient underflows."""
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, state)
    sent = buffer.div_(group_of(state).size()).to(torch.float16, copy=True)
    return sum_of(sent, state).then(lambda fut: fut.value().to(buffer.dtype))


MUTANTS = [
    Mutant("shares_from_a_table", ("20.1",)),
    Mutant("sums_in_half_first", ("20.2",), "rounded(float16)"),
    Mutant("divides_before_half", ("20.3",), "rounded(float16)"),
]
