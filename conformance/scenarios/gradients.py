"""The gradients that ranks feed, made so that the right answer is known.

Every value is a function of (seed, rank, step, parameter, element) alone, computed with integer
hashes and exact float64 arithmetic: the ranks that feed a gradient and the controller that judges
its mean compute the same bits, on any machine. A *kind* names what a step feeds:

crafted     world_size * k * 2**e with small integers k and one exponent e per element: every partial
            sum, every quotient and every rounding to half precision is exact, whatever the order of
            the sum, whether it divides before or after it, or multiplies by 1 / world_size. A right
            hook is bit-exact, so the test needs no tolerance.
constant    normal, the same at every step.
normal      nearly normal, mean 0, deviation 1 (twelve uniforms: exact, unlike Box-Muller).
small, small_constant
            normal and constant, a thousandth as large (2**-10), as most gradients of a model are.
wide        magnitudes from 1e-30 to 1e30 in one bucket.
nan, inf    crafted, with NaN on one rank; with +inf, -inf and both at different elements.
zero_one    crafted, but all zeros on rank 0.      zero_all    zeros on every rank.
tiny, tiny_float16, tiny_bfloat16
            multiples of the smallest subnormal of float32, float16, bfloat16.
minus_zero  -0.0 on every rank.
"""

import math
from functools import lru_cache

import torch

from conformance.scenarios.hook import SCALE_NUMEL, SCALES

KINDS = (
    *(
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
    ),
    *("tiny", "tiny_float16", "tiny_bfloat16", "minus_zero"),
)
_TINY_EXPONENT = {"tiny": -149, "tiny_bfloat16": -133, "tiny_float16": -24}
REPEATED = ("constant", "small_constant")  # the same at every step
_MASK = (1 << 64) - 1
SPECIAL_EVERY = (
    5  # every fifth element of a nan or inf step is special, so most still show the mean
)


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
        dtype: dtype of the parameter; for a complex one, real and imaginary parts are independent.
        world: number of ranks whose mean is taken.
        rank: global rank; ranks feed different values.
        step: step number; steps feed different values.
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
    """Return what many simulated ranks feed, ``[size, 3 * SCALE_NUMEL]`` in float64: the kinds of ``SCALES`` one after another.

    ``random`` is uniform in -1 to 1; ``large`` 128 to 256, with one sign on all ranks for each element; ``small`` 2**-16 to
    2**-15, likewise.
    """
    random, large, small = (
        _uniform(size * SCALE_NUMEL, (size, kind)).view(size, SCALE_NUMEL)
        for kind in range(len(SCALES))
    )
    sign = torch.ones(SCALE_NUMEL, dtype=torch.float64)
    sign[::2] = -1
    return torch.cat(
        [2 * random - 1, sign * 128 * (1 + large), sign * 2.0**-16 * (1 + small)], dim=1
    )


def uses(world: int, rank: int, step: int, param: int) -> bool:
    """Whether the forward of ``rank`` uses a parameter at ``step``, where some leave some out.

    Of every five parameters one is left out by all ranks, and one by all but one; other ones at every step.
    """
    left_out = (param + step) % 5
    return left_out != 1 and (left_out != 3 or rank == (param + step) // 5 % world)


def _values(kind: str, numel: int, world: int, rank: int, step: int, param: int) -> torch.Tensor:
    """Return ``numel`` float64 values, each exact before any cast."""
    if kind == "zero_all" or (kind == "zero_one" and rank == 0):
        return torch.zeros(numel, dtype=torch.float64)
    if kind.startswith("small"):
        return (
            _values(
                {"small": "normal", "small_constant": "constant"}[kind],
                numel,
                world,
                rank,
                step,
                param,
            )
            * 2.0**-10
        )
    if kind == "constant":
        return _constant(numel, rank, param).clone()
    if kind == "minus_zero":
        return torch.full((numel,), -0.0, dtype=torch.float64)
    if kind == "normal":
        return _bell(numel, (rank, step, param))
    if kind == "wide":
        exponent = (
            _integers(numel, 189, (step, param, 50))
            - 94
            + _integers(numel, 7, (rank, step, param, 51))
            - 3
        )
        sign = _integers(numel, 2, (rank, step, param, 52)) * 2 - 1
        return sign * (1 + _uniform(numel, (rank, step, param, 53))) * _power_of_two(exponent)
    values = world * _small_integers(numel, world, (rank, step, param)).double()
    if kind in _TINY_EXPONENT:
        return values * 2.0 ** _TINY_EXPONENT[kind]
    values = values * _power_of_two(_integers(numel, 7, (step, param, 60)) - 3)
    return _with_special(kind, values, rank) if kind in ("nan", "inf") else values


@lru_cache(maxsize=64)
def _constant(numel: int, rank: int, param: int) -> torch.Tensor:
    return _values("normal", numel, 1, rank, 0, param)


def _with_special(kind: str, values: torch.Tensor, rank: int) -> torch.Tensor:
    """Put NaN or infinities at every fifth element, on rank 0, on rank 1, or (opposite signs) on both."""
    at = torch.arange(0, len(values), SPECIAL_EVERY)
    which = (at // SPECIAL_EVERY) % 4
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
    """Non-zero integers so small that world * (any sum of world of them) is exact in bfloat16 (8 bits)."""
    bound = max(1, min(7, 255 // world**2))
    value = _integers(numel, 2 * bound, key) - bound
    return torch.where(value >= 0, value + 1, value)


def _uniform(numel: int, key: tuple[int, ...]) -> torch.Tensor:
    """Uniform multiples of 2**-24 in [0, 1): exact in float64, as are sums of twelve."""
    return _integers(numel, 1 << 24, key).double() * 2.0**-24


def _bell(numel: int, key: tuple[int, ...]) -> torch.Tensor:
    """Sums of twelve uniform draws, less 6: nearly normal, with variance 1; few at a time where they would not fit a cache."""
    together = 12 if numel <= 2048 else 1
    total = torch.zeros(numel, dtype=torch.int64)
    for first in range(0, 12, together):
        drawn = _integers(numel, 1 << 24, *((*key, i) for i in range(first, first + together)))
        total += drawn.sum(0) if together > 1 else drawn
    return total.double() * 2.0**-24 - 6


def _integers(numel: int, bound: int, *keys: tuple[int, ...]) -> torch.Tensor:
    """Integers in [0, bound), by SplitMix64 over the element's number (Steele et al., OOPSLA 2014); a row for each of several keys."""
    seeds = [_signed(_seed(key)) for key in keys]
    z = torch.arange(1, numel + 1, dtype=torch.int64).mul_(_signed(0x9E3779B97F4A7C15))
    z = z.add_(seeds[0]) if len(seeds) == 1 else z + torch.tensor(seeds).unsqueeze(1)
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(0x94D049BB133111EB))
    z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
    # The low 31 bits as a fraction of bound: a product and a shift, where a remainder would take most of the time.
    return z.bitwise_and_((1 << 31) - 1).mul_(bound).bitwise_right_shift_(31)


def _seed(key: tuple[int, ...]) -> int:
    seed = 0
    for part in key:
        seed = _mix(seed * 31 + part + 0x9E3779B97F4A7C15)
    return seed


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


@lru_cache(maxsize=1)
def _powers() -> torch.Tensor:
    return torch.tensor([2.0**e for e in range(-160, 161)], dtype=torch.float64)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return _powers()[exponent + 160]


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return ``tensor`` with the same values in the memory layout named."""
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return tensor.t().contiguous().t()
    return tensor


def sparse_rows(rows: int, rank: int, step: int) -> torch.Tensor:
    """Return the rows of an embedding that ``rank`` uses at ``step``: some shared, some its own."""
    return torch.tensor(sorted({0, (1 + rank + step) % rows, (5 + 2 * rank) % rows}))
