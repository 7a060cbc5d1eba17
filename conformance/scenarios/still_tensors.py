"""Buffers of the small network that nothing in a step changes.

They are of many dtypes. Some values no narrower dtype holds: a copy in float32, or in any other
dtype than their own, changes bits. Others are not finite, large or subnormal, as those of a causal
mask, or of an observer that has seen nothing yet. All but these extremes are drawn.

Frozen parameters are no part of the network: torch's ZeroRedundancyOptimizer takes parameters of
one dtype alone, and its optimizers in the backward take none that are frozen.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

# Bits of the significand behind its first one, and the smallest and largest exponent that is drawn.
_FLOATING = {
    "float64": (52, -1000, 1000),
    "float32": (23, -120, 120),
    "float16": (10, -14, 15),
    "bfloat16": (7, -120, 120),
}
# Bits; the first is always set.
_INTEGERS = {"int64": 63, "int32": 31, "uint8": 8}
# Of both precisions: the smallest subnormal, and numbers beyond the range of float16.
_EXTREMES = {
    "float32": (math.inf, -math.inf, math.nan, 1e30, -70_000.0, 2.0**-149, -1e-30),
    "float64": (math.inf, -math.inf, math.nan, 1e300, -1e39, 2.0**-1074, -1e-310),
}
_MOST = 9  # elements


@dataclass(frozen=True)
class StillTensor:
    """A buffer.

    Attributes:
        name: its name in the first layer.
        dtype: a name that torch has.
        values: its elements.
    """

    name: str
    dtype: str
    values: tuple[Any, ...]


def still_tensors(session_seed: int) -> list[StillTensor]:
    """Return the buffers of the network.

    Args:
        session_seed: the session's seed, which the values are drawn from.
    """
    purpose = "still"
    numbers = random.Random(f"{session_seed}/{purpose}")
    drawn: dict[str, list[Any]] = {
        dtype: _numbers(dtype, numbers) for dtype in (*_FLOATING, *_INTEGERS)
    }
    drawn["complex64"] = [
        complex(_number("float32", numbers), _number("float32", numbers)) for _ in range(5)
    ]
    # Each value occurs, in a drawn order.
    drawn["bool"] = numbers.sample([True, False] * 3, 6)
    made = [StillTensor(f"{purpose}_{dtype}", dtype, tuple(some)) for dtype, some in drawn.items()]
    made += [
        StillTensor(f"{purpose}_extremes_{dtype}", dtype, values)
        for dtype, values in _EXTREMES.items()
    ]
    return made


def _numbers(dtype: str, numbers: random.Random) -> list[float]:
    """Return drawn numbers of either sign, which no narrower dtype holds."""
    return [_number(dtype, numbers) for _ in range(numbers.randint(2, _MOST))]


def _number(dtype: str, numbers: random.Random) -> float:
    sign = 1 if dtype == "uint8" else numbers.choice((1, -1))
    if dtype in _INTEGERS:
        bits = _INTEGERS[dtype]
        return sign * (2 ** (bits - 1) | numbers.getrandbits(bits - 1) | 1)
    bits, smallest, largest = _FLOATING[dtype]
    # The last bit of the significand is set.
    significand = 2**bits | numbers.getrandbits(bits) | 1
    return math.ldexp(sign * significand, numbers.randint(smallest, largest) - bits)
