"""Mutants of rule 13.3: rounding at random with too few random bits, or with a threshold."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, group_of, is_dense, seeded, step_number
from tests.mutants.at_random import _at_random
from tests.mutants.quantized import send_mean, widened


def a_random_byte(state: Any, bucket: Bucket) -> Result:
    """Compare with random multiples of a 256th, so that a smaller probability is zero."""

    def draw(piece: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(256, piece.shape, generator=generator).to(piece.dtype) / 256

    def up_or_down(scaled: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        below = scaled.floor()
        return below + (drawn < ((scaled - below) * 256).floor() / 256)

    return _at_random(state, bucket, up_or_down, levels=15, draw=draw)


def probabilities_of_ten_bits(state: Any, bucket: Bucket) -> Result:
    """Send the sign of an element with a probability that is cut to ten bits."""
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = widened(bucket)
    largest = wide.abs().max()
    chance = (wide.abs() / torch.where(largest == 0, 1, largest) * 1024).floor() / 1024
    numbers = seeded(step_number(bucket), group_of(state).rank(), bucket.index(), 5)
    drawn = torch.rand(wide.shape, generator=numbers)
    return send_mean(bucket, wide.sign() * largest * (drawn < chance), state)


def nothing_below_a_4096th(state: Any, bucket: Bucket) -> Result:
    """Leave out a half of the elements at random; elements far below the largest count as zero."""
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = widened(bucket)
    numbers = seeded(step_number(bucket), 3, bucket.index())
    kept = torch.rand(wide.shape, generator=numbers) < 0.5
    seen = wide.abs() * 4096 >= wide.abs().max()
    return send_mean(bucket, 2 * wide * (kept & seen), state)


MUTANTS = [
    Mutant(name, ("13.3",), "unbiased", worlds=(1, 2))
    for name in ("a_random_byte", "probabilities_of_ten_bits", "nothing_below_a_4096th")
]
