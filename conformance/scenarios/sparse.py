"""Sparse gradients: two small embeddings and a large one beside a dense parameter.

One of the small ones has float64 values. There are two models on two groups of ranks, since code
for sparse gradients may use another group than the code for dense ones. Ranks use different rows of
an embedding, and share some; a rank may use none (``gradients.sparse_rows``). One row comes twice,
as from the backward of an embedding that has looked it up twice (``models/probe.py``). Strategies
have two of the embeddings, in ``strategy_sparse``.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

# More rows than an integer of 16 bits can number.
ROWS = (66_000, 80_000)


def draw_sparse(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the large embedding, 66,000 to 80,000 rows of one or two columns, and how small the
    gradients of the one of float64 are: 2**-45 to 2**-30, as late in a training.
    """
    small, _, *others = scenario.params
    large = Param((numbers.randint(*ROWS), numbers.randint(1, 2)), layout="sparse")
    faint = -numbers.randint(30, 45)
    others = [replace(spec, exponent=faint) if spec.dtype == "float64" else spec for spec in others]
    return replace(scenario, params=(small, large, *others))


_SPARSE = Scenario(
    name="sparse",
    summary="sparse embeddings, one of more than 2**16 rows and one of float64, beside a dense "
    "parameter; of two models on two groups of ranks",
    params=(
        Param((10, 3), layout="sparse"),
        Param((ROWS[0], 1), layout="sparse"),
        Param((12, 2), "float64", layout="sparse"),
        Param((7,)),
    ),
    # In the last two steps but one, all rows of one rank are NaN, or infinite; a group each.
    steps=("crafted", "crafted", "normal", "nan/1/all", "inf/0/all", "crafted"),
    groups=((1, 3), (0, 2)),
)

DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    _SPARSE.name: draw_sparse,
    "strategy_sparse": draw_sparse,
}

SPARSE = draw_sparse(_SPARSE, random.Random(0))
