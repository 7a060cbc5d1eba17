"""Sparse gradients: a small embedding and a large one beside a dense parameter.

Ranks use different rows of an embedding, and share some (``gradients.sparse_rows``).
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

# More rows than an integer of 16 bits can number.
_ROWS = (66_000, 80_000)


def draw_sparse(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the large embedding: 66,000 to 80,000 rows of one or two columns."""
    small, _, dense = scenario.params
    large = Param((numbers.randint(*_ROWS), numbers.randint(1, 2)), layout="sparse")
    return replace(scenario, params=(small, large, dense))


_SPARSE = Scenario(
    name="sparse",
    summary="a sparse embedding, and one of more than 2**16 rows, beside a dense parameter",
    params=(
        Param((10, 3), layout="sparse"),
        Param((_ROWS[0], 1), layout="sparse"),
        Param((7,)),
    ),
    steps=("crafted", "crafted", "normal"),
    world_sizes=(2,),
)

DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {_SPARSE.name: draw_sparse}

SPARSE = draw_sparse(_SPARSE, random.Random(0))
