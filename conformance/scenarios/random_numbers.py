"""Random tensors whose values are the same on every machine: a function of a key alone."""

from functools import lru_cache
from typing import Any

import numpy
import torch

_MASK = (1 << 64) - 1
# The constants of SplitMix64.
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def uniform(numel: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return uniform multiples of 2**-24 in [0, 1): exact in float64, as are sums of twelve."""
    return integers(numel, 1 << 24, key).double() * 2.0**-24


def bell(numel: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return sums of twelve uniform draws, less 6: nearly normal, with mean 0 and variance 1."""
    # All twelve draws at once are fastest as long as they fit into a cache.
    together = 12 if numel <= 2048 else 1
    total = torch.zeros(numel, dtype=torch.int64)
    for first in range(0, 12, together):
        drawn = integers(numel, 1 << 24, *((*key, i) for i in range(first, first + together)))
        total += drawn.sum(0) if together > 1 else drawn
    return total.double() * 2.0**-24 - 6


def integers(numel: int, bound: int, *keys: tuple[int, ...]) -> torch.Tensor:
    """Return integers in [0, bound): SplitMix64 of the key and the element's number.

    There is a row for each key if there are several keys. SplitMix64 is by Steele et al., OOPSLA
    2014.
    """
    # NumPy has unsigned integers, and takes a third of torch's time for a small array.
    seeds = numpy.array([_seed(key) for key in keys], dtype=numpy.uint64)
    z: Any = numpy.arange(1, numel + 1, dtype=numpy.uint64)
    z *= _GAMMA
    z = z + seeds[:, None] if len(keys) > 1 else numpy.add(z, seeds[0], out=z)
    z ^= z >> 30
    z *= _FIRST
    z ^= z >> 27
    z *= _SECOND
    z ^= z >> 31
    # Scale the low 31 bits, as a fraction, to the bound. A remainder would take most of the time.
    z &= (1 << 31) - 1
    z *= bound
    z >>= 31
    return torch.from_numpy(z.view(numpy.int64))


def _seed(key: tuple[int, ...]) -> int:
    """Return a hash of a key, as an unsigned integer of 64 bits."""
    seed = 0
    for part in key:
        seed = _mix(seed * 31 + part + _GAMMA)
    return seed


def _mix(z: int) -> int:
    """Return the output of SplitMix64 for a state."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=1)
def _powers() -> torch.Tensor:
    # A table of Python's powers is exact. torch.exp2 may be off by a unit in the last place.
    return torch.tensor([2.0**e for e in range(-160, 161)], dtype=torch.float64)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return exact powers of two in float64, for integers from -160 to 160."""
    return _powers()[exponent + 160]
