"""Parameters of other dtypes among those that some ranks leave out."""

import random
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

_HALVES = ("float16", "bfloat16")


def add_other_dtypes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Return ``unused`` with four more parameters, in a drawn order: of float16, bfloat16, float64,
    and one half dtype again; each is a matrix or a vector of 2 to 600 elements.

    Of four that follow one another, each has a step out of four in which one rank alone uses it
    (``gradients.uses``).
    """
    dtypes = [*_HALVES, "float64", numbers.choice(_HALVES)]
    numbers.shuffle(dtypes)
    more = tuple(Param(_shape(numbers), dtype) for dtype in dtypes)
    return replace(scenario, params=(*scenario.params, *more))


def _shape(numbers: random.Random) -> tuple[int, ...]:
    rows = numbers.randint(2, 24)
    return (rows, numbers.randint(2, 25)) if numbers.random() < 0.5 else (rows,)
