"""The right values of a sum of messages in which one is infinite."""

import math

import pytest
import torch

from conformance.judging.oracles.allowed_values import Allowed
from conformance.judging.oracles.collective_bounds import neighbours
from conformance.judging.oracles.collective_sums import allowed_sum


def rounded(values: list[float]) -> Allowed:
    """Return the right values of a message under rounded(float16)."""
    sent = torch.tensor(values, dtype=torch.float64)
    low, high = neighbours(sent, "float16")
    return Allowed(
        exact=sent,
        low=low,
        high=high,
        two_values=True,
        bound=sent.abs() * 2.0**-11 + 2.0**-25,
        relative_rounding=0.0,
        smallest_rounding=0.0,
    )


@pytest.mark.parametrize("other", [0.8346, -0.8346, 31.0, 58.5365, 0.0])
@pytest.mark.parametrize("got", [65504.0, math.inf])
def test_an_infinity_that_arrives_as_the_largest_number_is_rounded_in_the_sum(
    other: float, got: float
) -> None:
    """65504 + 0.8346 is 65504 in float16: seed 3379241113 of 18.22. 65504 + 58.5365 is beyond its
    range, and is cut off again: seed 4064199295 of 18.37.
    """
    right = allowed_sum([rounded([math.inf]), rounded([other])], None, "float16", 2.0**-23)
    assert not right.wrong(torch.tensor([got], dtype=torch.float64)).any()


def test_an_infinity_does_not_arrive_as_a_small_number() -> None:
    right = allowed_sum([rounded([math.inf]), rounded([0.5])], None, "float16", 2.0**-23)
    assert right.wrong(torch.tensor([1000.0], dtype=torch.float64)).all()
