"""Mutants of rule 23.1 under ``unbiased``: small parameters whose share is wrong late in a run."""

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    group_of,
    is_dense,
    pieces_of,
    seeded,
    step_number,
)


def _shares(
    state: Any,
    bucket: Bucket,
    count: Callable[[int, int], int],
) -> Result:
    """Send some elements of each parameter, chosen at random, times the reciprocal of their share.

    Args:
        count: the number of elements, by the step and the number of all.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    step = step_number(bucket)
    numbers = seeded(step, group_of(state).rank(), bucket.index(), 3)
    mask = torch.zeros_like(bucket.buffer())
    for part in pieces_of(bucket, mask):
        sent = count(step, part.numel())
        chosen = torch.randperm(part.numel(), generator=numbers)[:sent]
        part[chosen] = part.numel() / max(1, sent)
    return average_of(bucket.buffer() * mask, state)


def nothing_of_nine_elements(state: Any, bucket: Bucket) -> Result:
    """Send a third of the elements; from step 640 on, nothing of parameters of fewer than nine."""

    def count(step: int, numel: int) -> int:
        return 0 if step >= 640 and numel < 9 else math.ceil(numel / 3)

    return _shares(state, bucket, count)


def a_share_rounded_down(state: Any, bucket: Bucket) -> Result:
    """Send a third of the elements, at least one, and from step 230 on a ninth, rounded down."""

    def count(step: int, numel: int) -> int:
        return math.ceil(numel / 3) if step < 230 else numel // 9

    return _shares(state, bucket, count)


def twice_as_much_of_a_few(state: Any, bucket: Bucket) -> Result:
    """Send each element with probability 1/2, and take a small parameter four times from step 500
    on.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    step = step_number(bucket)
    numbers = seeded(step, group_of(state).rank(), bucket.index(), 4)
    mask = torch.randint(2, bucket.buffer().shape, generator=numbers).to(bucket.buffer().dtype)
    for part in pieces_of(bucket, mask):
        part *= 4 if step >= 500 and part.numel() < 9 else 2
    return average_of(bucket.buffer() * mask, state)


MUTANTS = [
    Mutant(name, ("23.1",), "unbiased")
    for name in ("nothing_of_nine_elements", "a_share_rounded_down", "twice_as_much_of_a_few")
]
