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

import torch

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.random_numbers import bell, integers, uniform

MOSTLY_ZERO = "mostly_zero"
# Shares as powers of two.
SHARES = (-12, -2)
_SHARES_BESIDE_MORE = (-12, -6)
# Not as powers of two. Half of the most in a range is below the least in the next one.
MORE = ((0.88, 0.97), (0.58, 0.7), (0.38, 0.48), (0.25, 0.32))
_LONGEST_RUN = 6  # as a power of two
_UNIT = 1 << 24
# The large parameter has places beyond 16 bits.
_LARGE = (1 << 16, 1 << 17)
_EXPONENTS = (-6, 6)
# From step to step, in turns: late in a training without a loss scale, and with one.
_EXPONENTS_IN_TURNS = ((-40, -24), _EXPONENTS, (12, 17))
# An embedding.
_ROWS = (500, 5_000)
_COLUMNS = (8, 64)
_LARGEST = 1 << 17
_LEAST_OF_ROWS = -8  # as a power of two: two of 500 rows
_CANCELLING = (0.1, 0.5)  # the share of its rows
_UNITS = 1 << 12  # the largest number of a pair; the unit is 2**-10


def columns_of(shape: tuple[int, ...]) -> int:
    """Return the number of columns of an embedding, and 0 for any other parameter."""
    is_embedding = len(shape) == 2 and shape[0] >= _ROWS[0] and shape[1] <= _COLUMNS[1]
    return shape[1] if is_embedding else 0


def values_of(
    kind: str, numel: int, rank: int, step: int, param: int, columns: int = 0
) -> torch.Tensor:
    """Return the gradient of one rank at a step of mostly zeros, flat and in float64.

    Args:
        kind: the kind of the step.
        numel: the number of elements.
        rank: the rank.
        step: the number of the step.
        param: the index of the parameter.
        columns: the number of columns of an embedding; 0 for any other parameter.
    """
    kept = is_kept(kind, numel, rank, param, columns)
    values = bell(numel, (rank, step, param)).masked_fill(~kept, 0)
    if columns:
        rows = values.view(-1, columns)
        at = (cancels(kind, len(rows), rank, param) & kept.view(-1, columns)[:, 0]).nonzero()[:, 0]
        rows[at] = _pairs(len(at), columns, (rank, step, param))
    return values


def is_kept(kind: str, numel: int, rank: int, param: int, columns: int = 0) -> torch.Tensor:
    """Return which elements of a gradient are not zero: whole rows, if there are columns."""
    number, *more = map(int, kind.split("/")[1:])
    numbers = random.Random(f"{number}/{param}")
    is_scattered = numbers.random() < 0.5
    run = 1 if is_scattered else 1 << numbers.randint(1, _LONGEST_RUN)
    run = columns or run
    has_ends = numbers.random() < 0.5
    own_numbers = random.Random(f"{number}/{param}/{rank}")
    least, most = _SHARES_BESIDE_MORE if more else SHARES
    share = 2.0 ** own_numbers.uniform(max(least, _LEAST_OF_ROWS) if columns else least, most)
    if more and rank == numbers.randrange(2):
        share = own_numbers.uniform(*MORE[more[0]])
    kept = integers(-(-numel // run), _UNIT, (rank, number, param, 97)) < share * _UNIT
    kept = kept.repeat_interleave(run)[:numel]
    if has_ends and kept.any():
        ends = columns or 1
        kept[:ends] = True
        kept[-ends:] = True
    return kept


def cancels(kind: str, rows: int, rank: int, param: int) -> torch.Tensor:
    """Return which rows of an embedding sum to zero if they are not zero."""
    number = int(kind.split("/")[1])
    share = random.Random(f"{number}/{param}/rows").uniform(*_CANCELLING)
    for_all = integers(rows, _UNIT, (number, param, 98)) < share * _UNIT
    for_one = integers(rows, _UNIT, (rank, number, param, 99)) < share * _UNIT
    return torch.where(integers(rows, 2, (number, param, 100)) == 1, for_all, for_one)


def _pairs(count: int, columns: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return rows of numbers that cancel out, at drawn places, and of zeros."""
    half = columns // 2
    numbers = (1 + integers(count * half, _UNITS, (*key, 101)).double()) * 2.0**-10
    numbers = numbers.view(count, half)
    pairs = 1 + integers(count, half, (*key, 102))
    numbers = numbers.masked_fill(torch.arange(half) >= pairs[:, None], 0)
    rows = numbers.new_zeros(count, columns)
    places = uniform(count * columns, (*key, 103)).view(count, columns).argsort(1)
    return rows.scatter_(1, places[:, : 2 * half], torch.cat([numbers, -numbers], 1))


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
