"""The gradients that ranks feed, made so that the right result is known.

Every value is a function of (kind, world size, rank, step, parameter, element) alone, computed with
integer hashes and exact float64 arithmetic. The ranks that feed a gradient and the controller that
judges its mean therefore compute the same bits, on any machine. There are these kinds of gradient:

crafted     world_size * k * 2**e, with small integers k and one exponent e for each element. Every
            partial sum, every quotient and every rounding to half precision is exact, whatever the
            order of the sum, and whether a hook divides before the sum, divides after it, or
            multiplies by 1 / world_size. A right hook is exact to the bit, so that the comparison
            needs no tolerance.
constant    normal, the same at every step.
normal      nearly normal, with mean 0 and deviation 1: the sum of twelve uniform values, which is
            exact, unlike Box-Muller.
small, small_constant
            normal and constant, a thousandth as large (2**-10), as most gradients of a model are.
wide        magnitudes from 1e-30 to 1e30 in one bucket.
nan         crafted, with NaN on one rank.
inf         crafted, with +inf, -inf and both at different elements.
zero_one    crafted, but all zeros on rank 0.
zero_all    zeros on every rank.
tiny, tiny_float16, tiny_bfloat16
            multiples of the smallest subnormal of float32, float16, bfloat16.
minus_zero  -0.0 on every rank.
"""

import math
from functools import lru_cache

import torch

from conformance.scenarios.hook import SCALE_NUMEL, SCALES

KINDS = (
    "crafted",
    "normal",
    "wide",
    "nan",
    "inf",
    "zero_one",
    "zero_all",
    "constant",
    "small",
    "small_constant",
    "tiny",
    "tiny_float16",
    "tiny_bfloat16",
    "minus_zero",
)
REPEATED = ("constant", "small_constant")  # the same at every step

# Every fifth element of a nan or inf step is special. Most elements still show the mean.
SPECIAL_EVERY = 5

# The exponent of the smallest subnormal of the dtype.
_TINY_EXPONENT = {"tiny": -149, "tiny_bfloat16": -133, "tiny_float16": -24}

# The kinds that are another kind, times 2**-10.
_SMALL_OF = {"small": "normal", "small_constant": "constant"}

_MASK = (1 << 64) - 1


def gradient(
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    world: int,
    rank: int,
    step: int,
    param: int,
) -> torch.Tensor:
    """Return the gradient that one rank feeds for one parameter at one step.

    Args:
        kind: one of ``KINDS``.
        shape: shape of the parameter; elements are numbered in C order.
        dtype: dtype of the parameter. Real and imaginary parts of a complex one are independent.
        world: number of ranks whose mean is taken.
        rank: global rank. Ranks feed different values.
        step: step number. Steps feed different values.
        param: index of the parameter in the model.
    """
    numel = math.prod(shape)
    if dtype.is_complex:
        parts = [
            _values(kind, numel, world, rank, step, 2 * param + 1000 + part) for part in (0, 1)
        ]
        return torch.complex(*parts).to(dtype).reshape(shape)
    return _values(kind, numel, world, rank, step, param).to(dtype).reshape(shape)


def at_scale(size: int) -> torch.Tensor:
    """Return the gradients of many simulated ranks, ``[size, 3 * SCALE_NUMEL]`` in float64.

    The kinds of ``SCALES`` follow one another: ``random`` is uniform in -1 to 1; ``large`` is 128
    to 256, with the same sign on all ranks for each element; ``small`` is 2**-16 to 2**-15,
    likewise.
    """
    random, large, small = (
        _uniform(size * SCALE_NUMEL, (size, kind)).view(size, SCALE_NUMEL)
        for kind in range(len(SCALES))
    )
    sign = torch.ones(SCALE_NUMEL, dtype=torch.float64)
    sign[::2] = -1
    parts = [
        2 * random - 1,
        sign * 128 * (1 + large),
        sign * 2.0**-16 * (1 + small),
    ]
    return torch.cat(parts, dim=1)


def uses(world: int, rank: int, step: int, param: int) -> bool:
    """Whether the forward of ``rank`` uses a parameter at ``step``, if parameters are left out.

    At every step, one of five parameters is left out by all ranks, and another one by all ranks but
    one. They are different ones from step to step.
    """
    position = (param + step) % 5
    if position == 1:
        return False
    if position == 3:
        only_user = (param + step) // 5 % world
        return rank == only_user
    return True


def _values(kind: str, numel: int, world: int, rank: int, step: int, param: int) -> torch.Tensor:
    """Return ``numel`` float64 values, each exact before any cast."""
    if kind == "zero_all" or (kind == "zero_one" and rank == 0):
        return torch.zeros(numel, dtype=torch.float64)
    if kind in _SMALL_OF:
        return _values(_SMALL_OF[kind], numel, world, rank, step, param) * 2.0**-10
    if kind == "constant":
        return _constant(numel, rank, param).clone()
    if kind == "minus_zero":
        return torch.full((numel,), -0.0, dtype=torch.float64)
    if kind == "normal":
        return _bell(numel, (rank, step, param))
    if kind == "wide":
        return _wide(numel, rank, step, param)
    values = world * _small_integers(numel, world, (rank, step, param)).double()
    if kind in _TINY_EXPONENT:
        return values * 2.0 ** _TINY_EXPONENT[kind]
    # The key has no rank: the exponent of an element is the same on all ranks, so that sums of
    # integers stay sums of integers.
    values = values * _power_of_two(_integers(numel, 7, (step, param, 60)) - 3)
    if kind in ("nan", "inf"):
        return _with_special(kind, values, rank)
    return values


def _wide(numel: int, rank: int, step: int, param: int) -> torch.Tensor:
    """Return values with magnitudes from 1e-30 to 1e30."""
    # Ranks have similar magnitudes at one element: the large part of the exponent has no rank in
    # its key. If magnitudes were independent, the largest rank alone would decide every mean.
    common = _integers(numel, 189, (step, param, 50)) - 94
    own = _integers(numel, 7, (rank, step, param, 51)) - 3
    sign = _integers(numel, 2, (rank, step, param, 52)) * 2 - 1
    mantissa = 1 + _uniform(numel, (rank, step, param, 53))
    return sign * mantissa * _power_of_two(common + own)


@lru_cache(maxsize=64)
def _constant(numel: int, rank: int, param: int) -> torch.Tensor:
    """Return the values that ``constant`` feeds at every step; they are cached."""
    return _values("normal", numel, 1, rank, 0, param)


def _with_special(kind: str, values: torch.Tensor, rank: int) -> torch.Tensor:
    """Put NaN or infinities at every fifth element.

    Infinities are on rank 0, on rank 1, or on both with opposite signs, so that the mean is NaN.
    """
    at = torch.arange(0, len(values), SPECIAL_EVERY)
    which = (at // SPECIAL_EVERY) % 4  # the four cases of ``inf``, in turn
    if kind == "nan":
        if rank == 0:
            values[at] = math.nan
    elif rank == 0:
        values[at[which == 0]] = math.inf
        values[at[which == 1]] = -math.inf
        values[at[which == 3]] = math.inf
    elif rank == 1:
        values[at[which == 2]] = math.inf
        values[at[which == 3]] = -math.inf
    return values


def _small_integers(numel: int, world: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return integers other than 0, for exact means in every dtype.

    They are so small that any sum of ``world`` such integers, times ``world``, is exact in
    bfloat16, which has 8 bits.
    """
    bound = max(1, min(7, 255 // world**2))
    value = _integers(numel, 2 * bound, key) - bound
    return torch.where(value >= 0, value + 1, value)


def _uniform(numel: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return uniform multiples of 2**-24 in [0, 1): exact in float64, as are sums of twelve."""
    return _integers(numel, 1 << 24, key).double() * 2.0**-24


def _bell(numel: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return sums of twelve uniform draws, less 6: nearly normal, with mean 0 and variance 1."""
    # All twelve draws at once are fastest as long as they fit into a cache.
    together = 12 if numel <= 2048 else 1
    total = torch.zeros(numel, dtype=torch.int64)
    for first in range(0, 12, together):
        drawn = _integers(numel, 1 << 24, *((*key, i) for i in range(first, first + together)))
        total += drawn.sum(0) if together > 1 else drawn
    return total.double() * 2.0**-24 - 6


def _integers(numel: int, bound: int, *keys: tuple[int, ...]) -> torch.Tensor:
    """Return integers in [0, bound): SplitMix64 of the key and the element's number.

    There is a row for each key if there are several keys. SplitMix64 is by Steele et al., OOPSLA
    2014.
    """
    seeds = [_signed(_seed(key)) for key in keys]
    z = torch.arange(1, numel + 1, dtype=torch.int64).mul_(_signed(0x9E3779B97F4A7C15))
    z = z.add_(seeds[0]) if len(seeds) == 1 else z + torch.tensor(seeds).unsqueeze(1)
    # torch has no unsigned shift: the mask clears the copies of the sign bit.
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(0x94D049BB133111EB))
    z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
    # Scale the low 31 bits, as a fraction, to the bound. A remainder would take most of the time.
    return z.bitwise_and_((1 << 31) - 1).mul_(bound).bitwise_right_shift_(31)


def _seed(key: tuple[int, ...]) -> int:
    """Return a hash of a key, as an unsigned integer of 64 bits."""
    seed = 0
    for part in key:
        seed = _mix(seed * 31 + part + 0x9E3779B97F4A7C15)
    return seed


def _mix(z: int) -> int:
    """Return the output of SplitMix64 for a state."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    """Return the integer of 64 bits with a sign that has the same bits."""
    value &= _MASK
    if value >> 63:
        return value - (1 << 64)
    return value


@lru_cache(maxsize=1)
def _powers() -> torch.Tensor:
    # A table of Python's powers is exact. torch.exp2 may be off by a unit in the last place.
    return torch.tensor([2.0**e for e in range(-160, 161)], dtype=torch.float64)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return _powers()[exponent + 160]


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor with the same values in another memory layout (``Param.layout``)."""
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return tensor.t().contiguous().t()
    return tensor


def sparse_rows(rows: int, rank: int, step: int) -> torch.Tensor:
    """Return the rows of an embedding that a rank uses at a step; some are shared."""
    return torch.tensor(sorted({0, (1 + rank + step) % rows, (5 + 2 * rank) % rows}))
