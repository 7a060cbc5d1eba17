"""Mutants of rule 13.15: random results that use the same random numbers twice within a step."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    group_of,
    is_dense,
    pieces_of,
    seeded,
    step_number,
)
from tests.mutants.quantized import send_mean, widened


def noise_of_a_shape(state: Any, bucket: Bucket) -> Result:
    """Seed the generator of each parameter by the step, the rank and its number of elements."""
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = widened(bucket)
    step = step_number(bucket)
    rank = group_of(state).rank()
    for piece in pieces_of(bucket, wide):
        if piece.numel():
            level = piece.abs().amax() / 7
            level.masked_fill_(level == 0, 1)
            draws = torch.rand(piece.shape, generator=seeded(step, rank, piece.numel()))
            piece.copy_((piece / level + draws).floor() * level)
    return send_mean(bucket, wide, state)


def block_of_4096(state: Any, bucket: Bucket) -> Result:
    """Draw 4,096 numbers for each bucket, and use them for one block after another."""
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = widened(bucket)
    largest = wide.abs().max()
    numbers = seeded(step_number(bucket), group_of(state).rank(), bucket.index())
    block = torch.rand(4096, generator=numbers, dtype=wide.dtype)
    draws = block.repeat(-(-wide.numel() // 4096))[: wide.numel()]
    return send_mean(bucket, wide.sign() * largest * (draws * largest < wide.abs()), state)


def the_same_places_in_both_halves(state: Any, bucket: Bucket) -> Result:
    """Draw a mask for half of a bucket, and send these places of both halves."""
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = widened(bucket)
    half = -(-wide.numel() // 2)
    mask = torch.rand(half, generator=seeded(step_number(bucket), 17, bucket.index())) < 0.5
    return send_mean(bucket, 2 * wide * torch.cat([mask, mask])[: wide.numel()], state)


MUTANTS = [
    Mutant(name, ("13.15",), "unbiased")
    for name in ("noise_of_a_shape", "block_of_4096", "the_same_places_in_both_halves")
]
