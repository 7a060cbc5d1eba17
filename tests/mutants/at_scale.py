"""Mutants of section 20: hooks that are right with four ranks, and wrong with a thousand."""

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
    sum_of,
)

_SHARES = (1.0, 1 / 2, 1 / 3, 1 / 4)


def shares_from_a_table(state: Any, bucket: Bucket) -> Result:
    """Look up the factor in a table for up to four ranks, at any world size."""
    size = group_of(state).size()
    return sum_of(bucket.buffer(), state).then(
        lambda fut: fut.value().div_(size) if size <= 4 else fut.value().mul_(_SHARES[size % 4])
    )


def twice_from_eight_on(state: Any, bucket: Bucket) -> Result:
    """Give twice the mean on eight ranks and more."""
    size = group_of(state).size()
    return sum_of(bucket.buffer(), state).then(
        lambda fut: fut.value().mul_((1 if size < 8 else 2) / size)
    )


def halves_by_shifts(state: Any, bucket: Bucket) -> Result:
    """Divide by the next power of two, except for the three ranks of a test."""
    size = group_of(state).size()
    divisor = size if size == 3 else 1 << (size - 1).bit_length()
    return sum_of(bucket.buffer(), state).then(lambda fut: fut.value().div_(divisor))


def dozens_of_racks(state: Any, bucket: Bucket) -> Result:
    """Count twelve ranks for each rack that has begun, from thirteen ranks on."""
    size = group_of(state).size()
    divisor = size if size <= 12 else -(-size // 12) * 12 + 1
    return sum_of(bucket.buffer(), state).then(lambda fut: fut.value().div_(divisor))


def rounds_and_doubles(state: Any, bucket: Bucket) -> Result:
    """Send bfloat16, and give twice the mean on twelve ranks and more."""
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, state)
    size = group_of(state).size()
    sent = buffer.mul_((1 if size < 12 else 2) / size).to(torch.bfloat16, copy=True)
    return sum_of(sent, state).then(lambda fut: fut.value().to(buffer.dtype))


def sums_of_many(state: Any, bucket: Bucket) -> Result:
    """Claim the sum, and give a sum of six ranks at most."""
    size = group_of(state).size()
    return sum_of(bucket.buffer(), state).then(lambda fut: fut.value().mul_(min(1.0, 6 / size)))


def waits_and_counts_in_four_bits(state: Any, bucket: Bucket) -> Result:
    """Wait for the sum, and divide it by a number of ranks that is kept in four bits."""
    group = group_of(state)
    dist.all_reduce(bucket.buffer(), group=group)
    return completed(bucket.buffer().div_(group.size() % 16 or 16))


def forgets_prime_nodes(state: Any, bucket: Bucket) -> Result:
    """Divide by a product of factors that lacks primes above 3 in the number of nodes of 8."""
    size = group_of(state).size()
    divisor = size
    if size % 8 == 0:
        divisor = 8
        nodes = size // 8
        for radix in (2, 3):
            while nodes % radix == 0:
                nodes //= radix
                divisor *= radix
    return sum_of(bucket.buffer(), state).then(lambda fut: fut.value().div_(divisor))


class Steps:
    """A state that counts steps."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.count = 0


def whole_nodes_after_ten_steps(state: Steps, bucket: Bucket) -> Result:
    """Count eight ranks for each node that has begun, after ten steps and from nine ranks on."""
    size = state.group.size()
    divisor = size if size <= 8 or state.count < 10 else -(-size // 8) * 8
    state.count += bucket.is_last()
    return sum_of(bucket.buffer(), state.group).then(lambda fut: fut.value().div_(divisor))


def gathers_ten(state: Any, bucket: Bucket) -> Result:
    """Wait for the gradients of all ranks, and average those of ten."""
    if not is_dense(bucket):
        return average(bucket, state)
    return completed(torch.stack(gather(bucket.buffer(), state)[:10]).mean(0))


def polls_and_doubles(state: Any, bucket: Bucket) -> Result:
    """Poll until the sum is there, and give twice the mean on nine ranks and more."""
    size = group_of(state).size()
    work = dist.all_reduce(bucket.buffer(), group=group_of(state), async_op=True)
    while not work.is_completed():
        pass
    return completed(bucket.buffer().mul_((1 if size < 9 else 2) / size))


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


_REAL_TOO = dict.fromkeys(("24.1", "24.2"), "real ranks may be as many")

MUTANTS = [
    Mutant("shares_from_a_table", ("20.1",), because=_REAL_TOO),
    Mutant("twice_from_eight_on", ("20.1",), because=_REAL_TOO),
    Mutant("halves_by_shifts", ("20.1",), because=_REAL_TOO),
    Mutant("dozens_of_racks", ("20.1",)),
    Mutant("rounds_and_doubles", ("20.1",), "rounded(bfloat16)"),
    Mutant("sums_of_many", ("20.1",), "sum", because=_REAL_TOO),
    Mutant("waits_and_counts_in_four_bits", ("20.1",)),
    Mutant("forgets_prime_nodes", ("20.1",)),
    Mutant("whole_nodes_after_ten_steps", ("20.1",), state=f"{__name__}:Steps"),
    Mutant("gathers_ten", ("20.1",)),
    Mutant("polls_and_doubles", ("20.1",)),
    Mutant("sums_in_half_first", ("20.2",), "rounded(float16)"),
    Mutant("divides_before_half", ("20.3",), "rounded(float16)"),
]
