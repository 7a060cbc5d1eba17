"""Gradients in which some elements after others are the largest of the model, on all ranks.

A compressor without feedback may leave out small elements in every step, but no element for ever,
however large it is. In these steps every N-th element is large: half as large again as the others,
or up to twice as large. N is a prime number of at least 8 / delta, so that

    a compressor that keeps delta of ordinary gradients by their largest elements has room for all
    large ones: of normal values the largest delta / 8 have at most 8 times their share of the
    square, if delta is 1/30 or more
    N successive elements have one large one, in any block, and in any column of a matrix

The kind of such a step is ``turn/N/FIRST.FIRST...``, with each parameter's first large element.
"""

import math
from collections.abc import Sequence

from conformance.scenarios.model import Param
from conformance.scenarios.tables import prime_from

TURN = "turn"
LARGEST_OTHER = 2.0  # of the other elements
LEAST = 3.0  # of the large ones; up to 1 more is drawn
_SHARE = 8  # times fewer large elements than delta of them


def turns(params: Sequence[Param], delta: float) -> list[str]:
    """Return the kinds of the steps in which each element of a model is large once."""
    distance = prime_from(math.ceil(_SHARE / delta))
    starts = [0]
    for spec in params:
        starts.append(starts[-1] + math.prod(spec.shape))
    return [
        f"{TURN}/{distance}/" + ".".join(str((number - start) % distance) for start in starts[:-1])
        for number in range(distance)
    ]


def large_elements(kind: str, numel: int, param: int) -> range | None:
    """Return the large elements of a parameter, or None for other kinds."""
    base, *words = kind.split("/")
    if base != TURN:
        return None
    distance, firsts = words
    return range(int(firsts.split(".")[param]), numel, int(distance))
