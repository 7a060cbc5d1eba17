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
small_nan/1, small_inf/1/3, and others
            nan and inf at the same place, but for finite values that are a thousandth as large.
narrow_float16, narrow_bfloat16
            normal, rounded to that dtype, as gradients are that a backward under autocast leaves in
            float32.
flat        world_size * (rank + 1) in every element, which takes no time to make.
level, level_constant
            nearly the same number everywhere, of another sign on odd ranks, and 1/64 of normal; the
            latter the same at every step. Any compressor keeps much of it, at any size: a low rank
            keeps little of a large matrix of independent values.
heavy_first, heavy_last
            like level_constant, but with the same sign on all ranks, and 32 times as large on the
            first or on the last rank. The mean is then about as far from zero, from its double and
            from the gradient of any rank as it is large.
heavy_in_turn
            the same, with 32 times as much on another rank in each step.
faint_first, faint_last
            heavy_first and heavy_last, times 2**-20.
large       normal, 2**10 times as large.
drift       normal and an eighth of constant: a mean that does not vanish over many steps.
spike       drift, four times as large.
beside      the same at every step, with the same sign on all ranks: as many elements of 4 to 5 as
            there are ranks, and between them small ones, a 2**4th to a 2**15th of 4, so that each
            octave has twice as many as the one above; constant in a parameter that is too small.
same, same_one
            constant, and the same on all ranks; same_one is zeros on all ranks but rank 0.
wide        magnitudes from 1e-30 to 1e30 in one bucket.
tiled       crafted values of 4,099 elements, repeated: large gradients that cost little.
nan         crafted, with NaN at every fifth element, each on one rank; ranks take turns.
inf         crafted, with +inf, -inf and both at different elements, on ranks in turn.
nan/1, nan/1/3, nan/1/3/-1, and the same with inf
            tiled, with NaN on one rank, in one parameter, at one element (``specials.py``, which
            has more forms).
zero_one    crafted, but all zeros on rank 0.
zero_all    zeros on every rank.
tiny, tiny_float16, tiny_bfloat16
            multiples of the smallest subnormal of float32, float16, bfloat16.
minus_zero  -0.0 on every rank.
training    the values of a training run; the parameter's number decides which (``PATTERNS``).
training_constant
            the same at every step.
alike       normal, the same on all ranks and at every step.
faint, small_faint
            2**-20 to 2**-19 (times 2**-10), of random sign: not zero, and the same at every step.
few/tail/1/all/5, and others
            zero but for a few elements of about the same size (``few_elements.py``), of the same
            sign on all ranks; the norm is about that of normal.
mostly_zero/5, and others
            normal, but for zeros in most elements, by other shares on each rank
            (``mostly_zero.py``).
turn/37/5.12, and others
            the same at every step: normal, cut at 2, but for every 37th element, which is 3 to 4,
            of the same sign on all ranks (``turns.py``).
grown/3, and others
            constant, 2**3 times as large (``growth.py``).
resting/3, and others
            crafted, but for one parameter, whose gradients are zero (``resting_parameter.py``).
settling    constant, for steps in which every rank uses every parameter (``uses``).
normal@3, constant@3, settling@3, and others
            normal, constant or settling; ranks use the parameters that they use in step 3, as in a
            rest of several steps.

The patterns of ``training``:

heavy       Student's t with 2 degrees of freedom, whose distribution function has the inverse
            (2u - 1) / sqrt(2u (1 - u)). IEEE 754 defines each operation to the last bit. In a
            thousand elements the largest is about 20 to 40; its variance is infinite.
rows        an embedding's: runs of 16 elements are zero but for one of eight, another one on each
            rank and in each step.
outlier     normal, but for one element of 2**13 to 2**14.
ties        1 or -1.
normal      as above.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from conformance.scenarios.dust import DUST
from conformance.scenarios.dust_values import dust
from conformance.scenarios.few_elements import FEW, places
from conformance.scenarios.growth import LONE, growth_of, lone_growth
from conformance.scenarios.hook import SCALE_NUMEL, SCALES
from conformance.scenarios.impulses import ALONE, feeds_alone
from conformance.scenarios.model import DRAINING, Param
from conformance.scenarios.mostly_zero import MOSTLY_ZERO, columns_of
from conformance.scenarios.mostly_zero_values import values_of
from conformance.scenarios.random_numbers import (
    bell,
    integers,
    power_of_two,
    scaled_integers,
    uniform,
)
from conformance.scenarios.resting_parameter import RESTING, rests
from conformance.scenarios.specials import (
    SPECIAL_EVERY,
    base_kind,
    place_of,
    put_at_place,
    spread,
)
from conformance.scenarios.tables import rows
from conformance.scenarios.turns import LARGEST_OTHER, LEAST, TURN, large_elements

KINDS = (
    "crafted",
    "tiled",
    "normal",
    "wide",
    "nan",
    "inf",
    "zero_one",
    "zero_all",
    "constant",
    "small",
    "small_constant",
    "small_nan",
    "small_inf",
    "flat",
    "level",
    "level_constant",
    "heavy_first",
    "heavy_last",
    "heavy_in_turn",
    "faint_first",
    "faint_last",
    "tiny",
    "tiny_float16",
    "tiny_bfloat16",
    "minus_zero",
    "large",
    "drift",
    "spike",
    "beside",
    "same",
    "same_one",
    "training",
    "training_constant",
    "alike",
    "alone",
    "faint",
    "small_faint",
    "settling",
    "narrow_float16",
    "narrow_bfloat16",
)
_NARROW = {"narrow_float16": torch.float16, "narrow_bfloat16": torch.bfloat16}
_HEAVY = ("heavy_first", "heavy_last", "heavy_in_turn")
BESIDE_FROM = 4096  # elements of a parameter that has small elements beside large ones
TABLE = 10_000  # the table's number among parameters: no model has as many
# The same at every step.
REPEATED = (
    "constant",
    "small_constant",
    "level_constant",
    "heavy_first",
    "heavy_last",
    "faint_first",
    "faint_last",
    "beside",
    "same",
    "same_one",
    "training_constant",
    "alike",
    "alone",
    "faint",
    "small_faint",
    "settling",
)
PATTERNS = ("heavy", "rows", "outlier", "ties", "normal")
RUN = 16  # elements that are zero together in ``rows``
RUNS = 8  # one of them is not zero

# The elements of a tiled gradient that are not repetitions; a prime number.
TILE = 4099
# A twin trains on the inputs of other steps, times a factor, so that a hook that mixes the two
# models shows.
TWIN_OFFSET = 7
TWIN_FACTOR = -2

# The exponent of the smallest subnormal of the dtype.
_TINY_EXPONENT = {"tiny": -149, "tiny_bfloat16": -133, "tiny_float16": -24}

# The kinds that are another kind, times a power of two.
_SCALED = {
    "faint_first": ("heavy_first", -20),
    "faint_last": ("heavy_last", -20),
    "small": ("normal", -10),
    "small_constant": ("constant", -10),
    "small_faint": ("faint", -10),
    "small_nan": ("nan", -10),
    "small_inf": ("inf", -10),
    "large": ("normal", 10),
    "spike": ("drift", 2),
}


def gradient(
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    world: int,
    rank: int,
    step: int,
    param: int,
    exponent: int = 0,
    period: int = 0,
) -> torch.Tensor:
    """Return the gradient that one rank feeds for one parameter at one step.

    Args:
        kind: one of ``KINDS``; ``nan`` and ``inf`` may name a place.
        shape: shape of the parameter; elements are numbered in C order.
        dtype: dtype of the parameter. Real and imaginary parts of a complex one are independent.
        world: number of ranks whose mean is taken.
        rank: global rank. Ranks feed different values.
        step: step number. Steps feed different values.
        param: index of the parameter in the model.
        exponent: the values are multiplied by ``2**exponent``, unless they are subnormal by design;
            see ``Param.exponent``.
        period: the length of the table that the values repeat (``scenarios/tables.py``); 0 if they
            repeat nothing.
    """
    if period:
        made = table(kind, dtype, world=world, rank=rank, step=step, period=period)
        return tile(made, math.prod(shape), param, exponent).reshape(shape)
    numel = math.prod(shape)
    if kind == "flat" and not dtype.is_complex:
        # Not by way of float64, which doubles the time and the memory.
        return torch.full(shape, world * (rank + 1) * 2.0**exponent, dtype=dtype)
    scale = 1.0 if kind in _TINY_EXPONENT else 2.0**exponent
    if dtype.is_complex:
        parts = [
            _values(kind, numel, world, rank, step, 2 * param + 1000 + part) * scale
            for part in (0, 1)
        ]
        return torch.complex(*parts).to(dtype).reshape(shape)
    values = _values(kind, numel, world, rank, step, param, columns_of(shape))
    if exponent:
        values = values * scale
    return values.to(dtype).reshape(shape)


@lru_cache(maxsize=16)
def table(
    kind: str, dtype: torch.dtype, *, world: int, rank: int, step: int, period: int
) -> torch.Tensor:
    """Return the table of ``period`` values that all gradients of a rank repeat at one step.

    The arguments are those of :func:`gradient`.
    """
    real = _values(kind, period, world, rank, step, TABLE)
    if not dtype.is_complex:
        return real.to(dtype)
    return torch.complex(real, _values(kind, period, world, rank, step, TABLE + 1)).to(dtype)


def tile(table: torch.Tensor, numel: int, param: int, exponent: int = 0) -> torch.Tensor:
    """Return a flat gradient of ``numel`` elements that repeats a table."""
    flat = torch.empty(numel, dtype=table.dtype)
    for row in rows(numel, len(table), param, exponent):
        values = table[row.column : row.column + row.end - row.begin]
        torch.mul(values, row.sign, out=flat[row.begin : row.end])
    return flat


@lru_cache(maxsize=64)
def at_scale(size: int) -> torch.Tensor:
    """Return the gradients of many simulated ranks, ``[size, 3 * SCALE_NUMEL]`` in float64.

    It is kept, and not to be changed. Each later step feeds them :func:`rotated`.

    The kinds of ``SCALES`` follow one another: ``random`` is 1/4 to 1, ``large`` is 128 to 256, and
    ``small`` is 2**-16 to 2**-15; each element has the same sign on all ranks.
    """
    random, large, small = (
        uniform(size * SCALE_NUMEL, (size, kind)).view(size, SCALE_NUMEL)
        for kind in range(len(SCALES))
    )
    sign = torch.ones(SCALE_NUMEL, dtype=torch.float64)
    sign[::2] = -1
    parts = [
        sign * (1 + 3 * random) / 4,
        sign * 128 * (1 + large),
        sign * 2.0**-16 * (1 + small),
    ]
    return torch.cat(parts, dim=1)


def rotated(values: torch.Tensor, step: int) -> torch.Tensor:
    """Return values of :func:`at_scale` with each kind's elements moved by as many places as steps.

    So the results of two steps differ, and a negative number undoes it.
    """
    return values.unflatten(-1, (len(SCALES), SCALE_NUMEL)).roll(step, -1).flatten(-2)


def uses(world: int, rank: int, step: int, param: int, kind: str = "") -> bool:
    """Whether the forward of ``rank`` uses a parameter at ``step``, if parameters are left out.

    At every step, one of five parameters is left out by all ranks, and another one by all ranks but
    one. They are different ones from step to step, and those of another step if the kind names
    that. In steps of a ``DRAINING`` kind none is left out.
    """
    if kind in DRAINING:
        return True
    _, names_step, other = kind.partition("@")
    if names_step:
        step = int(other)
    position = (param + step) % 5
    if position == 1:
        return False
    if position == 3:
        only_user = (param + step) // 5 % world
        return rank == only_user
    return True


def _values(
    kind: str, numel: int, world: int, rank: int, step: int, param: int, columns: int = 0
) -> torch.Tensor:
    """Return ``numel`` float64 values, each exact before any cast."""
    kind = kind.partition("@")[0]
    if kind == "zero_all" or (kind == "zero_one" and rank == 0):
        return torch.zeros(numel, dtype=torch.float64)
    base = base_kind(kind)
    if base in _SCALED:
        plain, exponent = _SCALED[base]
        plain += kind.removeprefix(base)
        return _values(plain, numel, world, rank, step, param) * 2.0**exponent
    if kind == "level":
        level = -1.0 if rank % 2 else 2.0
        return level * (1 + bell(numel, (rank, step, param)) * 2.0**-6)
    if kind in _HEAVY:
        heavy_rank = {"heavy_first": 0, "heavy_last": world - 1}.get(kind, step % world)
        is_heavy = rank == heavy_rank
        level = 2.0 if is_heavy else 2.0**-4
        return level * (1 + bell(numel, (rank, 0, param)) * 2.0**-6)
    if kind == "level_constant":
        return _values("level", numel, world, rank, 0, param)
    if kind == "constant" or growth_of(kind):
        return _constant(numel, rank, param) * 2.0 ** growth_of(kind)
    if kind == "flat":
        return torch.full((numel,), float(world * (rank + 1)), dtype=torch.float64)
    if kind == "drift":
        return _constant(numel, rank, param) / 8 + bell(numel, (rank, step, param))
    if kind == "beside":
        return _beside(numel, world, rank, param).clone()
    if kind in ("same", "same_one"):
        used = kind == "same" or rank == 0
        return _constant(numel, 0, param) * used
    if kind == "settling":
        return _constant(numel, rank, param).clone()
    if kind == "alike":
        return _constant(numel, 0, param).clone()
    if kind == ALONE:
        alone = feeds_alone(world, rank, param)
        return (_constant if alone else _faint)(numel, rank, param).clone()
    if kind == "faint":
        return _faint(numel, rank, param).clone()
    if kind == "training_constant":
        return _training_constant(numel, rank, param).clone()
    if kind == "training":
        return _training(numel, rank, step, param)
    if kind == "minus_zero":
        return torch.full((numel,), -0.0, dtype=torch.float64)
    if kind == "normal":
        return bell(numel, (rank, step, param))
    if base == LONE:
        return bell(numel, (rank, step, param)) * 2.0 ** lone_growth(kind, rank)
    if kind in _NARROW:
        return bell(numel, (rank, step, param)).to(_NARROW[kind]).double()
    if kind == "wide":
        return _wide(numel, rank, step, param)
    if kind.startswith(DUST):
        return dust(kind, numel, rank, param)
    if kind.startswith(FEW):
        return _few(numel, places(kind, numel, param), (step, param), rank)
    if kind.startswith(MOSTLY_ZERO):
        return values_of(kind, numel, rank, step, param, columns)
    if kind.startswith(TURN):
        return _turn(kind, numel, rank, param)
    if kind.startswith(RESTING):
        if rests(kind, param):
            return torch.zeros(numel, dtype=torch.float64)
        return _values("crafted", numel, world, rank, step, param)
    place = place_of(kind)
    if kind == "tiled" or place:
        tile = _values("crafted", min(numel, TILE), world, rank, step, param)
        values = tile.repeat(-(-numel // TILE))[:numel]
        if place:
            return put_at_place(kind, values, place, world, rank, param, columns)
        return values
    if kind in _TINY_EXPONENT:
        values = world * _small_integers(numel, world, (rank, step, param)).double()
        return values * 2.0 ** _TINY_EXPONENT[kind]
    values = _crafted(numel, world, rank, step, param)
    if kind in ("nan", "inf"):
        # The owner of an element is the same on all ranks.
        owners = integers(-(-numel // SPECIAL_EVERY), world, (step, param, 70))
        spread(kind, values, owners, world, rank)
    return values


def _few(numel: int, at: Sequence[int], key: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return zeros, but for some places; the norm is about the root of the number of elements."""
    values = torch.zeros(numel, dtype=torch.float64)
    if at:
        sign = integers(len(at), 2, (*key, 90)) * 2 - 1
        size = 1 + uniform(len(at), (rank, *key, 91)) / 2
        values[list(at)] = sign * size * 2.0 ** round(math.log2(numel / len(at)) / 2)
    return values


def _turn(kind: str, numel: int, rank: int, param: int) -> torch.Tensor:
    """Return values with some that are larger than all others."""
    at = list(large_elements(kind, numel, param) or ())
    first = at[0] if at else 0
    values = bell(numel, (rank, first, param)).clamp(-LARGEST_OTHER, LARGEST_OTHER)
    sign = integers(len(at), 2, (first, param, 95)) * 2 - 1
    values[at] = sign * (LEAST + uniform(len(at), (rank, first, param, 96)))
    return values


def _wide(numel: int, rank: int, step: int, param: int) -> torch.Tensor:
    """Return values with magnitudes from 1e-30 to 1e30."""
    # Ranks have similar magnitudes at one element: the large part of the exponent has no rank in
    # its key. If magnitudes were independent, the largest rank alone would decide every mean.
    common = integers(numel, 189, (step, param, 50)) - 94
    own = integers(numel, 7, (rank, step, param, 51)) - 3
    sign = integers(numel, 2, (rank, step, param, 52)) * 2 - 1
    mantissa = 1 + uniform(numel, (rank, step, param, 53))
    return sign * mantissa * power_of_two(common + own)


@lru_cache(maxsize=16)
def _beside(numel: int, world: int, rank: int, param: int) -> torch.Tensor:
    """Return the values that ``beside`` feeds at every step; they are cached."""
    if numel < BESIDE_FROM:
        return _constant(numel, rank, param)
    # With the reciprocal of a uniform number, as many elements are above x as are below 1 / x.
    sizes = 2.0**-15 / uniform(numel, (param, 92)).clamp(min=2.0**-11)
    sizes[:: numel // world][:world] = 1
    sign = integers(numel, 2, (param, 93)) * 2 - 1
    return 4 * sign * sizes * (1 + uniform(numel, (rank, param, 94)) / 4)


@lru_cache(maxsize=64)
def _constant(numel: int, rank: int, param: int) -> torch.Tensor:
    """Return the values that ``constant`` feeds at every step; they are cached."""
    return _values("normal", numel, 1, rank, 0, param)


@lru_cache(maxsize=64)
def _faint(numel: int, rank: int, param: int) -> torch.Tensor:
    """Return the values that ``faint`` feeds at every step; they are cached."""
    sign = integers(numel, 2, (rank, param, 70)) * 2 - 1
    return sign * (1 + uniform(numel, (rank, param, 71))) * 2.0**-20


@lru_cache(maxsize=64)
def _training_constant(numel: int, rank: int, param: int) -> torch.Tensor:
    """Return the values that ``training_constant`` feeds at every step; they are cached."""
    return _training(numel, rank, 0, param)


def _training(numel: int, rank: int, step: int, param: int) -> torch.Tensor:
    """Return values of the pattern that belongs to a parameter."""
    key = (rank, step, param)
    pattern = PATTERNS[param % len(PATTERNS)]
    if pattern == "heavy":
        return _heavy(numel, key)
    if pattern == "ties":
        sign = integers(numel, 2, (*key, 82)) * 2 - 1
        return sign.double()
    values = bell(numel, key)
    if not numel or pattern == "normal":
        return values
    if pattern == "outlier":
        at = int(integers(1, numel, (*key, 84)))
        values[at] = (8192 + int(integers(1, 8192, (*key, 85)))) * (1 if values[at] > 0 else -1)
        return values
    runs = -(-numel // RUN)
    kept = integers(runs, RUNS, (*key, 86)) == 0
    # At least one run is not zero.
    kept[int(integers(1, runs, (*key, 87)))] = True
    return values * kept.repeat_interleave(RUN)[:numel]


def _heavy(numel: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return draws of Student's t with 2 degrees of freedom."""
    # The product of two numbers of 25 bits is exact; the root and the quotient are rounded
    # correctly.
    above = 2 * integers(numel, 1 << 24, (*key, 81)).double() + 1
    below = 2.0**25 - above
    return (above - below) / (2 * above * below).sqrt()


def _crafted(numel: int, world: int, rank: int, step: int, param: int) -> torch.Tensor:
    """Return small integers times the number of ranks and powers of two, for exact means."""
    # The key of the exponents has no rank: the exponent of an element is the same on all ranks, so
    # that sums of integers stay sums of integers.
    bound = _largest_integer(world)
    return scaled_integers(numel, bound, world, (rank, step, param), (step, param, 60))


def _largest_integer(world: int) -> int:
    """Return the largest of small integers whose mean is exact in every dtype.

    Any sum of ``world`` such integers, times ``world``, is exact in bfloat16, which has 8 bits.
    """
    return max(1, min(7, 255 // world**2))


def _small_integers(numel: int, world: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return integers other than 0, for exact means in every dtype."""
    bound = _largest_integer(world)
    value = integers(numel, 2 * bound, key) - bound
    return torch.where(value >= 0, value + 1, value)


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor with the same values in another memory layout (``Param.layout``)."""
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "channels_last_3d":
        return tensor.contiguous(memory_format=torch.channels_last_3d)
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "columns":
        first = tensor.shape[-1] // 2 + 1
        wide = tensor.new_zeros((*tensor.shape[:-1], 2 * first + tensor.shape[-1]))
        columns = wide[..., first : first + tensor.shape[-1]]
        columns.copy_(tensor)
        return columns
    return tensor


_MANY_ROWS = 1000
_MORE_ROWS = 24  # of a large embedding: the errors of random results cancel out over many rows
# The ranks that use no row of an embedding, by the step: at most one of a pair that forms a group.
_WITHOUT_ROWS: tuple[tuple[int, ...], ...] = ((), (2, 3), (1,))


def sparse_rows(spec: Param, rank: int, step: int) -> torch.Tensor:
    """Return the rows of an embedding that a rank uses at a step; some are shared.

    A large embedding is used at both ends, in the middle and, most often, from its quarter on. In
    two of three steps there is a rank that uses none. If the numbers of rows are given
    (``Param.rows``), the first row comes first and the last one next, and of the others a half is
    the same on ranks that use as many.
    """
    rows = spec.shape[0]
    if spec.rows:
        counts = spec.rows[step % len(spec.rows)]
        score = uniform(rows, (step, 97))
        is_own = integers(rows, 2, (step, 98)) == 1
        score = torch.where(is_own, uniform(rows, (rank, step, 99)), score)
        score[0] = -2
        score[-1] = -1
        return score.argsort()[: counts[rank % len(counts)]].sort().values
    if rank in _WITHOUT_ROWS[step % len(_WITHOUT_ROWS)]:
        return torch.empty(0, dtype=torch.int64)
    used = {0, (1 + rank + step) % rows, (5 + 2 * rank) % rows}
    if rows >= _MANY_ROWS:
        used |= {rows - 1, rows - 2 - rank - step, rows // 2 + 3 * rank - step}
        # Every other one is shared by all ranks.
        begin = rows // 4 + step
        used |= {begin + 5 * place + rank * (place % 2) for place in range(_MORE_ROWS)}
    return torch.tensor(sorted(used))
