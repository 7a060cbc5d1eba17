"""Gradients that are mostly zeros, as those of an embedding with ``sparse=False``, of experts and
of units that are off.

A hook may send the places and the values of such a gradient, and choose that way by the share of
elements that are not zero. The kind of such a step is ``mostly_zero/NUMBER``, or
``mostly_zero/NUMBER/MORE``; NUMBER is drawn from the session's seed. For each parameter it decides

    whether elements that are not zero are scattered, or in runs of 2 to 64, as the rows of an
    embedding are
    whether the first element and the last one are among them, on each rank that has any

and for each rank the share of these elements, from 2**-12 to 1/4, whatever those of other ranks
are. In a small parameter some ranks have none.

With MORE one of the first two ranks has far more than the others, which have 2**-12 to 2**-6: a
share that is drawn from the range with that number, of four. A choice by the mean of all shares
then meets a rank whose own share is on the other side of the threshold, for any threshold from 0.17
to 0.88: it is above half of the share, and below the share, in one of these steps.

A matrix of 500 rows or more, and 64 columns or fewer, is an embedding: whole rows are zero, and a
rank has 2**-8 or more of the others. A hook may select the rows that
it sends by the sum of their elements. So a share of 0.1 to 0.5 of the other rows sum to exactly
zero: they have one pair or more of a number and its negative, at drawn places, and zeros. For half
of the rows it is drawn for each rank, and for the others for all ranks together. The sum is exact
in float32, in any order, since the numbers are small multiples of 2**-10.
"""

import math
import random
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

MOSTLY_ZERO = "mostly_zero"
# Shares of one rank with far more. Half of the most in a range is below the least in the next one.
MORE = ((0.88, 0.97), (0.58, 0.7), (0.38, 0.48), (0.25, 0.32))
# The large parameter has places beyond 16 bits.
_LARGE = (1 << 16, 1 << 17)
_EXPONENTS = (-6, 6)
# From step to step, in turns: late in a training without a loss scale, and with one.
_EXPONENTS_IN_TURNS = ((-40, -24), _EXPONENTS, (12, 17))
# An embedding.
_ROWS = (500, 5_000)
_COLUMNS = (8, 64)
_LARGEST = 1 << 17


def columns_of(shape: tuple[int, ...]) -> int:
    """Return the number of columns of an embedding, and 0 for any other parameter."""
    is_embedding = len(shape) == 2 and shape[0] >= _ROWS[0] and shape[1] <= _COLUMNS[1]
    return shape[1] if is_embedding else 0


def add_mostly_zero_steps(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Return a scenario with six more steps of mostly zeros, in a drawn order with the others but
    the first, and with two more parameters: one of 2**16 to 2**17 elements, and an embedding of 500
    to 5,000 rows of 8 to 64 columns, of at most 2**17 elements.

    In four of these steps one rank has far more elements that are not zero than the others. From
    step to step the gradients of these two parameters are 2**-40 to 2**-24, 2**-6 to 2**6, and
    2**12 to 2**17 times as large as others, in turns.
    """
    first, *others = scenario.steps
    for more in ("", "", *(f"/{number}" for number in range(len(MORE)))):
        others.append(f"{MOSTLY_ZERO}/{numbers.randrange(10**6)}{more}")
    numbers.shuffle(others)
    large = Param((numbers.randint(*_LARGE),))
    added = tuple(
        replace(spec, exponent=0, exponents=_draw_exponents(numbers))
        for spec in (large, draw_embedding(numbers))
    )
    return replace(scenario, steps=(first, *others), params=(*scenario.params, *added))


def _draw_exponents(numbers: random.Random) -> tuple[int, ...]:
    """Draw the exponents of the steps of one parameter, one from each range."""
    ranges = numbers.sample(_EXPONENTS_IN_TURNS, len(_EXPONENTS_IN_TURNS))
    return tuple(numbers.randint(*bounds) for bounds in ranges)


def draw_embedding(numbers: random.Random, largest: int = _LARGEST) -> Param:
    """Draw an embedding of 500 to 5,000 rows of 8 to 64 columns, of at most ``largest`` elements,
    and the exponent of its gradients.
    """
    columns = round(2.0 ** numbers.uniform(*map(math.log2, _COLUMNS)))
    most = min(_ROWS[1], largest // columns)
    rows = round(2.0 ** numbers.uniform(math.log2(_ROWS[0]), math.log2(most)))
    return Param((rows, columns), exponent=numbers.randint(*_EXPONENTS))
