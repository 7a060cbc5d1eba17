"""Mutants of 13.18: elements are selected with probabilities that are wrong if they are small."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, group_of, is_dense, seeded, step_number
from tests.mutants.quantized import send_mean, widened


def _selected(
    state: Any,
    bucket: Bucket,
    factor: Callable[[torch.Tensor], torch.Tensor],
    often: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda wide, chance: chance,
) -> Result:
    """Send a quarter of the elements, the larger ones more often.

    Args:
        factor: of an element that is sent, by the probability with which it should be.
        often: the probability with which it is, by the element and the one that it should have.
    """
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = widened(bucket)
    sizes = wide.abs().double()
    mean = sizes.mean()
    chance = (sizes / 4 / torch.where(mean == 0, 1, mean)).clamp(max=1)
    numbers = seeded(step_number(bucket), group_of(state).rank(), bucket.index(), 9)
    drawn = torch.rand(wide.shape, generator=numbers, dtype=torch.float64)
    sent = torch.where(drawn < often(wide, chance), wide.double() * factor(chance), 0)
    # An infinity has the probability NaN.
    return send_mean(bucket, torch.where(chance.isnan(), wide.double(), sent).to(wide.dtype), state)


def divides_by_a_hundredth(state: Any, bucket: Bucket) -> Result:
    """Divide by the probability, or by a hundredth if that is more."""
    return _selected(state, bucket, lambda chance: 1 / chance.clamp(min=0.01))


def adds_an_epsilon(state: Any, bucket: Bucket) -> Result:
    """Divide by the probability and an epsilon."""
    return _selected(state, bucket, lambda chance: 1 / (chance + 0.002))


def gives_up_small_ones(state: Any, bucket: Bucket) -> Result:
    """Send nothing that has a smaller probability than 1/128."""
    return _selected(state, bucket, lambda chance: (chance >= 1 / 128) / chance)


def four_times_if_positive(state: Any, bucket: Bucket) -> Result:
    """Send small elements four times as often if they are positive."""
    return _selected(
        state,
        bucket,
        lambda chance: 1 / chance,
        lambda wide, chance: torch.where((chance < 1 / 128) & (wide > 0), 4 * chance, chance),
    )


def coins_of_the_buckets_dtype(state: Any, bucket: Bucket) -> Result:
    """Draw a coin in the dtype of the bucket: the sign of an element is sent with its share of the
    largest one among 128, each of which is sent as that.
    """
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = widened(bucket)
    rows = torch.nn.functional.pad(wide, (0, -wide.numel() % 128)).view(-1, 128)
    largest = rows.abs().amax(1, keepdim=True)
    numbers = seeded(step_number(bucket), group_of(state).rank(), bucket.index(), 6)
    coins = torch.rand(rows.shape, dtype=bucket.buffer().dtype, generator=numbers)
    # Infinities and NaN are sent as they are.
    sent = torch.where(coins * largest < rows.abs(), rows.sign() * largest, 0)
    sent = torch.where(largest.isfinite(), sent, rows)
    return send_mean(bucket, sent.view(-1)[: wide.numel()], state)


def never_below_a_16th_in_half(state: Any, bucket: Bucket) -> Result:
    """Send elements of half precision at least with probability 1/16, and divide by their own."""
    is_half = bucket.buffer().element_size() == 2
    return _selected(
        state,
        bucket,
        lambda chance: 1 / chance,
        lambda wide, chance: chance.clamp(min=1 / 16) if is_half else chance,
    )


MUTANTS = [
    Mutant(name, ("13.18",), "unbiased")
    for name in (
        "divides_by_a_hundredth",
        "adds_an_epsilon",
        "gives_up_small_ones",
        "four_times_if_positive",
        "coins_of_the_buckets_dtype",
        "never_below_a_16th_in_half",
    )
]
