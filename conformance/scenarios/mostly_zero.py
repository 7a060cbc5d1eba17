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
"""

import random
from dataclasses import replace

import torch

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.random_numbers import integers

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
_EXPONENTS = (-6, 6)  # of the large parameter


def is_kept(kind: str, numel: int, rank: int, param: int) -> torch.Tensor:
    """Return which elements of a gradient are not zero."""
    number, *more = map(int, kind.split("/")[1:])
    numbers = random.Random(f"{number}/{param}")
    is_scattered = numbers.random() < 0.5
    run = 1 if is_scattered else 1 << numbers.randint(1, _LONGEST_RUN)
    has_ends = numbers.random() < 0.5
    own_numbers = random.Random(f"{number}/{param}/{rank}")
    share = 2.0 ** own_numbers.uniform(*(_SHARES_BESIDE_MORE if more else SHARES))
    if more and rank == numbers.randrange(2):
        share = own_numbers.uniform(*MORE[more[0]])
    kept = integers(-(-numel // run), _UNIT, (rank, number, param, 97)) < share * _UNIT
    kept = kept.repeat_interleave(run)[:numel]
    if has_ends and kept.any():
        kept[[0, -1]] = True
    return kept


def add_mostly_zero_steps(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Return a scenario with six more steps of mostly zeros, in a drawn order with the others but
    the first, and with one more parameter, of 2**16 to 2**17 elements.

    In four of these steps one rank has far more elements that are not zero than the others.
    """
    first, *others = scenario.steps
    for more in ("", "", *(f"/{number}" for number in range(len(MORE)))):
        others.append(f"{MOSTLY_ZERO}/{numbers.randrange(10**6)}{more}")
    numbers.shuffle(others)
    large = Param((numbers.randint(*_LARGE),), exponent=numbers.randint(*_EXPONENTS))
    return replace(scenario, steps=(first, *others), params=(*scenario.params, large))
