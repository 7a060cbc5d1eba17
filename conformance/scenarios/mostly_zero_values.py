"""The values of gradients that are mostly zeros (``mostly_zero.py``)."""

import random

import torch

from conformance.scenarios.mostly_zero import MORE
from conformance.scenarios.random_numbers import bell, integers, uniform

# Shares of the other ranks, as powers of two.
SHARES = (-12, -2)
_SHARES_BESIDE_MORE = (-12, -6)
_LONGEST_RUN = 6  # as a power of two
_UNIT = 1 << 24
# Of an embedding.
_LEAST_OF_ROWS = -8  # as a power of two: two of 500 rows
_CANCELLING = (0.1, 0.5)  # the share of its rows
_UNITS = 1 << 12  # the largest number of a pair; the unit is 2**-10


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
