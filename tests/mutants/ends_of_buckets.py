"""Mutants that never send a few elements: after the last block, before the first, at borders.

In gradients that are spread over a bucket the rest of the norm hides them.
"""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    finite,
    group_of,
    is_dense,
    kept,
    pieces_of,
    seeded,
    step_number,
)
from tests.mutants.quantized import send_mean, widened

LARGE = 256  # elements; smaller buckets are sent as they are


def whole_blocks_only(state: Any, bucket: Bucket) -> Result:
    """Quantize blocks of 256 elements to eight bits, and drop what is left of a bucket."""
    if not is_dense(bucket) or bucket.buffer().numel() < LARGE:
        return average(bucket, state)
    wide = widened(bucket)
    count = wide.numel() // 256
    blocks = wide[: 256 * count].view(count, 256)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    levels = (blocks / torch.where(scale == 0, 1, scale)).round()
    sent = torch.zeros_like(wide)
    sent[: 256 * count] = (levels * scale).reshape(-1)
    return send_mean(bucket, sent, state)


def first_of_each_block(state: Any, bucket: Bucket) -> Result:
    """Send the larger half of a bucket, and overwrite the first element of each block of 64 by a
    header.
    """
    buffer = bucket.buffer()
    if is_dense(bucket) and buffer.numel() >= LARGE:
        order = buffer.abs().argsort(descending=True)
        buffer[order[(buffer.numel() + 1) // 2 :]] = 0
        buffer[::64] = 0
    return average(bucket, state)


def last_of_each_parameter(state: Any, bucket: Bucket) -> Result:
    """Copy a parameter's elements up to the last but one."""
    if is_dense(bucket):
        for piece in pieces_of(bucket):
            if piece.numel() >= LARGE:
                piece[-1] = 0
    return average(bucket, state)


def odd_one_stays(state: Any, bucket: Bucket) -> Result:
    """Pack two elements into a byte; the last one of an odd number stays in the residual."""
    if not is_dense(bucket) or bucket.buffer().is_complex():
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        if piece.numel() < LARGE:
            continue
        value = piece + kept.get(parameter, 0)
        scale = value.abs().max() / 7
        sent = (value / torch.where(scale == 0, 1, scale)).round() * scale
        sent[piece.numel() // 2 * 2 :] = 0
        kept[parameter] = finite(value - sent)
        piece.copy_(sent)
    return average(bucket, state)


def first_index_is_reserved(state: Any, bucket: Bucket) -> Result:
    """Send the larger half of a parameter, whose places begin with 1; the rest is kept."""
    if not is_dense(bucket) or bucket.buffer().is_complex():
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        if piece.numel() < LARGE:
            continue
        value = piece + kept.get(parameter, 0)
        chosen = 1 + value[1:].abs().topk(piece.numel() // 2).indices
        kept[parameter] = finite(value.index_fill(0, chosen, 0))
        piece.copy_(value - kept[parameter])
    return average(bucket, state)


def no_block_of_17_left(state: Any, bucket: Bucket) -> Result:
    """Round blocks of 17 elements at random, and leave the last elements of a bucket zero."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide = widened(bucket)
    numbers = seeded(step_number(bucket), group_of(state).rank(), bucket.index())
    drawn = torch.rand(wide.shape, generator=numbers).to(wide.dtype)
    for block, random in zip(wide.split(17), drawn.split(17), strict=True):
        if len(block) < 17 < LARGE <= wide.numel():
            block.zero_()
        elif len(block):
            scale = block.abs().max() / 3
            scale = torch.where(scale == 0, 1, scale)
            block.copy_((block / scale + random).floor() * scale)
    return send_mean(bucket, wide, state)


_LEVELS = "compressed(feedback=False, delta=0.99)"

MUTANTS = [
    Mutant("whole_blocks_only", ("13.2",), _LEVELS, worlds=(1, 2)),
    Mutant(
        "first_of_each_block", ("13.2",), "compressed(feedback=False, delta=0.3)", worlds=(1, 2)
    ),
    Mutant("last_of_each_parameter", ("13.2",), _LEVELS, worlds=(1, 2)),
    Mutant("odd_one_stays", ("2.12",), "compressed(delta=0.5)", worlds=(1, 2)),
    Mutant("first_index_is_reserved", ("2.12",), "compressed(delta=0.25)", worlds=(1, 2)),
    Mutant("no_block_of_17_left", ("13.3",), "unbiased", worlds=(1, 2)),
]
