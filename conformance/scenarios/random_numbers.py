"""Random tensors whose values are the same on every machine: a function of a key alone."""

from collections.abc import Sequence
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
    seeds = _seeds([(*key, i) for i in range(12)])
    total: Any = numpy.empty(numel)
    # All twelve draws at once are fastest as long as they fit into a cache.
    for first in range(0, numel, _TOGETHER):
        part = total[first : first + _TOGETHER]
        part[:] = _integers(len(part), 1 << 24, seeds, first).sum(0)
    total *= 2.0**-24
    total -= 6
    return _tensor(total)


def integers(numel: int, bound: int, *keys: tuple[int, ...]) -> torch.Tensor:
    """Return integers in [0, bound): SplitMix64 of the key and the element's number.

    There is a row for each key if there are several keys. SplitMix64 is by Steele et al., OOPSLA
    2014.
    """
    drawn = _integers(numel, bound, _seeds(keys))
    return _tensor(drawn if len(keys) > 1 else drawn[0])


def scaled_integers(
    numel: int, bound: int, factor: int, key: tuple[int, ...], exponents_key: tuple[int, ...]
) -> torch.Tensor:
    """Return integers from -bound to bound but 0, times ``factor``, each times its own power of
    two from 2**-3 to 2**3, in float64.

    Args:
        numel: the number of elements.
        bound: the largest integer.
        factor: of all elements.
        key: of the integers.
        exponents_key: of the exponents.
    """
    # One small operation of torch takes as long as several of NumPy.
    values = _integers(numel, 2 * bound, _seeds([key]))[0]
    values -= bound
    values += values >= 0
    values *= factor
    exponents = _integers(numel, 7, _seeds([exponents_key]))[0]
    exponents -= 3
    return _tensor(numpy.ldexp(values, exponents))


def _tensor(values: Any) -> torch.Tensor:
    """Return an array of NumPy as a tensor with strides as torch makes them.

    Those of an array without elements are 0, with which torch refuses to view other dtypes.
    """
    tensor = torch.from_numpy(values)
    return tensor if tensor.numel() else torch.empty(values.shape, dtype=tensor.dtype)


def _integers(numel: int, bound: int, seeds: Any, first: int = 0) -> Any:
    """Return a row of integers for each seed, as an array of NumPy.

    Args:
        numel: the number of integers in a row.
        bound: what they are below.
        seeds: of the rows.
        first: the number of the row's first element.
    """
    # NumPy has unsigned integers, and takes a third of torch's time for a small array.
    if first:
        seeds = seeds + numpy.uint64(first * _GAMMA & _MASK)
    counted = _FIRST_STATES[:numel] if numel <= _KEPT else _count(numel)
    z: Any = counted + seeds[:, None]
    z ^= z >> 30
    z *= _FIRST
    z ^= z >> 27
    z *= _SECOND
    z ^= z >> 31
    # Scale the low 31 bits, as a fraction, to the bound. A remainder would take most of the time.
    z &= (1 << 31) - 1
    z *= bound
    z >>= 31
    return z.view(numpy.int64)


def _count(numel: int) -> Any:
    """Return the states of SplitMix64 for the seed 0."""
    z: Any = numpy.arange(1, numel + 1, dtype=numpy.uint64)
    z *= _GAMMA
    return z


def _seeds(keys: Sequence[tuple[int, ...]]) -> Any:
    """Return the seed of each key."""
    return numpy.array([_seed(key) for key in keys], dtype=numpy.uint64)


_TOGETHER = 2048  # elements
_KEPT = 1 << 14
_FIRST_STATES = _count(_KEPT)


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
