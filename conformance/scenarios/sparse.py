"""Sparse gradients: two small embeddings and a large one beside a dense parameter.

One of the small ones has float64 values. There are two models on two groups of ranks, since code
for sparse gradients may use another group than the code for dense ones. Ranks use different rows of
an embedding, and share some; a rank may use none (``gradients.sparse_rows``). Unless results are
lossy or parameters are stepped, the numbers of rows, the groups and the nodes are drawn. One row
comes twice, as from the backward of an embedding that has looked it up twice (``models/probe.py``).
Strategies have two of the embeddings, in ``strategy_sparse``.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, pairwise

from conformance.scenarios.model import Param, Scenario

# More rows than an integer of 16 bits can number.
ROWS = (66_000, 80_000)
_RANKS = 5


def draw_sparse(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the large embedding, 66,000 to 80,000 rows of one or two columns, and how small the
    gradients of the one of float64 are: 2**-45 to 2**-30, as late in a training.
    """
    small, _, *others = scenario.params
    large = Param((numbers.randint(*ROWS), numbers.randint(1, 2)), layout="sparse")
    faint = -numbers.randint(30, 45)
    others = [replace(spec, exponent=faint) if spec.dtype == "float64" else spec for spec in others]
    return replace(scenario, params=(small, large, *others))


def draw_rows(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw how many rows of each embedding each rank uses in each step, on groups of three ranks
    and of two.

    The numbers come from none to a share of the rows, which is drawn from a half to nearly all, by
    the logarithm. Of the large embedding the first five steps have an eighth of that at most, and
    one rank has all of it in the sixth or the seventh. In the second or the third step all ranks of
    a group use no row. One rank of the larger group is on another node than the two others.
    """
    late = numbers.choice((5, 6))
    empty = numbers.choice((1, 2))
    steps = (*scenario.steps, "normal")
    scenario = with_uneven_groups(replace(scenario, steps=steps), numbers)
    at_rest = numbers.choice(scenario.groups)
    params = []
    for spec in scenario.params:
        if spec.layout == "sparse":
            most = max(1, int(spec.shape[0] * numbers.uniform(0.5, 0.95)))
            at_first = most // 8 if spec.shape[0] >= ROWS[0] else most
            counts = [
                [_up_to(at_first if step < late else most, numbers) for _ in range(_RANKS)]
                for step in range(len(steps))
            ]
            counts[late][numbers.randrange(_RANKS)] = most
            for rank in at_rest:
                counts[empty][rank] = 0
            # Ranks that feed NaN, or infinities.
            for step, rank in ((3, 1), (4, 0)):
                counts[step][rank] = max(1, counts[step][rank])
            spec = replace(spec, rows=tuple(map(tuple, counts)))
        params.append(spec)
    return replace(scenario, params=tuple(params), nodes=_draw_nodes(scenario, numbers))


def _draw_nodes(scenario: Scenario, numbers: random.Random) -> tuple[int, ...]:
    """Draw two or three nodes of all ranks: one has two ranks of the larger group, and another one
    has the third.
    """
    (larger,) = (group for group in scenario.groups if len(group) == 3)
    layouts = []
    for count in (1, 2):
        for ends in combinations(range(1, _RANKS), count):
            on_nodes = [sum(end <= rank for end in ends) for rank in larger]
            if len(set(on_nodes)) == 2:
                layouts.append((*ends, _RANKS))
    ends = numbers.choice(layouts)
    return tuple(end - begin for begin, end in pairwise((0, *ends)))


def with_uneven_groups(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Return a scenario on a group of three ranks, which are not the first ones, and one of two."""
    pairs = [pair for pair in combinations(range(_RANKS), 2) if pair != (3, 4)]
    pair = numbers.choice(pairs)
    others = tuple(rank for rank in range(_RANKS) if rank not in pair)
    groups = [others, pair]
    numbers.shuffle(groups)
    return replace(scenario, groups=tuple(groups))


def _up_to(most: int, numbers: random.Random) -> int:
    """Draw a number from 0 to ``most``, by the logarithm."""
    return round(math.exp(numbers.random() * math.log(most + 1))) - 1


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
