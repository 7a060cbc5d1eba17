"""Mutants of rule 13.3, and of other rules under its claim: rounding at random."""

from collections.abc import Callable
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
from tests.mutants.feedback import random_k
from tests.mutants.quantized import send_mean, widened


def _at_random(
    state: Any,
    bucket: Bucket,
    level: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    levels: int = 3,
    seed: Callable[[int, int], tuple[int, ...]] = lambda step, rank: (step, rank),
    draw: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None,
) -> Result:
    """Round each parameter to a few levels of its largest magnitude, and average.

    ``level`` rounds the scaled values, given random numbers in [0, 1).
    """
    if not is_dense(bucket):
        return average(bucket, state)
    wide = widened(bucket)
    step = step_number(bucket)
    for number, piece in enumerate(pieces_of(bucket, wide)):
        if piece.numel():
            largest = piece.abs().amax()
            largest.masked_fill_(largest == 0, 1)
            generator = seeded(*seed(step, group_of(state).rank()), number)
            drawn = (
                torch.rand(piece.shape, dtype=piece.dtype, generator=generator)
                if draw is None
                else draw(piece, generator)
            )
            piece.copy_(level((piece / largest).mul_(levels), drawn).mul_(largest).div_(levels))
    return send_mean(bucket, wide, state)


def _up_or_down(scaled: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Round at random so that the expectation is ``scaled``: right."""
    return (scaled + drawn).floor()


def rounds_to_nearest(state: Any, bucket: Bucket) -> Result:
    """Round to the nearest level instead of at random."""
    return _at_random(state, bucket, lambda scaled, drawn: scaled.round())


def rounds_down(state: Any, bucket: Bucket) -> Result:
    """Forget to add the random numbers, so that every element is rounded down."""
    return _at_random(state, bucket, lambda scaled, drawn: scaled.floor())


def rounds_by_half(state: Any, bucket: Bucket) -> Result:
    """Choose the level above or below with probability 1/2, whatever the element's distance."""
    return _at_random(
        state,
        bucket,
        lambda scaled, drawn: torch.where(drawn < 0.5, scaled.floor(), scaled.ceil()),
        levels=1,
    )


def draws_once(state: Any, bucket: Bucket) -> Result:
    """Seed the generator without the step, so that every step has the same random numbers."""
    return _at_random(state, bucket, _up_or_down, seed=lambda step, rank: (rank,))


def random_elements_unscaled(state: Any, bucket: Bucket) -> Result:
    """Send a quarter of the elements without scaling them by four."""
    return random_k(state, bucket, feedback=False, scaled=False)


def half_of_one_element(state: Any, bucket: Bucket) -> Result:
    """Scale for two sent elements if only one is sent."""
    return random_k(state, bucket, feedback=False, least=2)


def _unscaled_between(state: Any, bucket: Bucket, least: int, most: int) -> Result:
    """Send a quarter of the elements, and scale them by four but in buckets of some sizes."""
    scaled = not (is_dense(bucket) and least <= bucket.buffer().numel() < most)
    return random_k(state, bucket, feedback=False, scaled=scaled)


def unscaled_below_256(state: Any, bucket: Bucket) -> Result:
    """Forget the scale in buckets of 64 to 255 elements."""
    return _unscaled_between(state, bucket, 64, 256)


def unscaled_in_the_middle(state: Any, bucket: Bucket) -> Result:
    """Forget the scale in buckets of 3,000 to 17,999 elements."""
    return _unscaled_between(state, bucket, 3_000, 18_000)


def levels_down_in_the_middle(state: Any, bucket: Bucket) -> Result:
    """Round down in place of at random in buckets of 2,000 to 15,999 elements."""
    is_wrong = is_dense(bucket) and 2_000 <= bucket.buffer().numel() < 16_000

    def level(scaled: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return scaled.floor() if is_wrong else _up_or_down(scaled, drawn)

    return _at_random(state, bucket, level)


def random_elements_of_each_rank(state: Any, bucket: Bucket) -> Result:
    """Sum values by position although each rank has drawn other elements."""
    return random_k(state, bucket, seed=group_of(state).rank(), feedback=False)


def random_levels_undivided(state: Any, bucket: Bucket) -> Result:
    """Round at random, and return the sum instead of the mean."""
    size = group_of(state).size()
    result = _at_random(state, bucket, _up_or_down)
    return result.then(lambda fut: fut.value() * size)


def draws_from_global(state: Any, bucket: Bucket) -> Result:
    """Draw from torch's global generator."""
    return _at_random(
        state, bucket, _up_or_down, draw=lambda piece, generator: torch.rand_like(piece)
    )


def draws_unseeded(state: Any, bucket: Bucket) -> Result:
    """Draw from a generator that is seeded by the system's entropy."""

    def draw(piece: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        generator.seed()
        return torch.rand(piece.shape, dtype=piece.dtype, generator=generator)

    return _at_random(state, bucket, _up_or_down, draw=draw)


def dithers_zeros(state: Any, bucket: Bucket) -> Result:
    """Move some zeros up or down by one level."""

    def level(scaled: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return _up_or_down(scaled, drawn).add_((drawn * 3 - 1.5).round_().mul_(scaled == 0))

    return _at_random(state, bucket, level)


def rounds_nothing(state: Any, bucket: Bucket) -> Result:
    """Claim unbiased rounding, and average exactly."""
    return average(bucket, state)


MUTANTS = [
    *(
        Mutant(name, ("13.3",), "unbiased")
        for name in ("rounds_to_nearest", "rounds_down", "rounds_by_half", "draws_once")
    ),
    *(
        Mutant(name, ("13.3",), "unbiased")
        for name in (
            "random_elements_unscaled",
            "random_elements_of_each_rank",
            "half_of_one_element",
        )
    ),
    Mutant("random_levels_undivided", ("13.3",), "unbiased"),
    *(
        Mutant(name, ("13.16",), "unbiased")
        for name in ("unscaled_below_256", "unscaled_in_the_middle", "levels_down_in_the_middle")
    ),
    Mutant(
        "draws_from_global",
        ("9.1",),
        "unbiased",
        because={"11.1": "another model draws from the same generator"},
    ),
    Mutant(
        "draws_unseeded",
        ("3.3",),
        "unbiased",
        because={"1.10": "no two runs give the same result"},
    ),
    Mutant("dithers_zeros", ("8.3",), "unbiased"),
    Mutant("rounds_nothing", ("2.10",), "unbiased"),
]
