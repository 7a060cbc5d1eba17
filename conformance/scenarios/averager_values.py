"""The values that parameters are set to before a call of an averager.

The ranks that set them and the rules that judge the averages both call this module. ``place`` is a
rank's number within its group.

A parameter without a gradient on any rank may be left out of an average. It has the same values on
all ranks, those of the group's first rank, so that both ways give the same mean. A frozen parameter
has the same values at all steps as well.

The kind ``limit`` has values of float16 near 40,000: the sum over two ranks overflows, and the mean
does not. They are 32 (L + W j) with small integers j and the largest multiple L of W up to 1248, so
that quotients by W, and their sums, are multiples of 32 below 65,504 and exact in float16, for W up
to 8. Odd elements are negative. Large parameters repeat a table of such values.
Other dtypes get crafted values.

The kind ``rows`` has the first values in all rows but a third of them, which are drawn for each
step. There ranks have multiples of W / 16 more in one column and less in the next, so that rows
keep their sums, and means are exact.

The kind ``near`` has values that are close to each other on all ranks (``averager_loops.py``).

Integers lie anywhere in the range of their dtype, those of int64 within 2**50, so that float64
holds their sums. Every other one lies in the upper half, so that two of them overflow in a sum.
"""

import math
from dataclasses import dataclass

import torch

from conformance.scenarios.averager_loops import NEAR_KIND, ROWS_KIND, near_kind
from conformance.scenarios.averager_rests import rests
from conformance.scenarios.averager_training import (
    START,
    TIED,
    is_empty,
    is_frozen,
    option,
    special_source,
)
from conformance.scenarios.gradients import gradient, uses
from conformance.scenarios.model import Param, Scenario

_LIMIT = 1248  # 32 times this is 39,936

# Larger parameters repeat the draws of so many elements, since a million draws take long.
_PERIOD = 8191


@dataclass(frozen=True)
class Source:
    """The source of a parameter's values.

    Attributes:
        kind: the kind of gradient that the values are like.
        rank: the global rank whose values they are.
        number: the number of the step.
    """

    kind: str
    rank: int
    number: int


def source(scenario: Scenario, group: tuple[int, ...], place: int, step: int, index: int) -> Source:
    """Return the source of a parameter's values at an ordinary step."""
    kind = scenario.steps[step]
    if scenario.params[index].dtype != "float16" and kind == "limit":
        kind = "crafted"
    if is_frozen(scenario, step, index):
        return Source(kind, group[0], 0)
    size = len(group)
    if kind == NEAR_KIND:
        kind = near_kind(scenario, step, index, size)
    if not any(has_gradient(scenario, size, other, step, index) for other in range(size)):
        return Source(kind, group[0], step)
    return Source(kind, group[special_source(scenario, step, place, size)], step)


def first_source(group: tuple[int, ...]) -> Source:
    """Return the source of the first values, which are the same on all ranks."""
    return Source("crafted", group[0], START)


def has_gradient(scenario: Scenario, size: int, place: int, step: int, index: int) -> bool:
    """Whether the rank in a place of its group has a gradient for a parameter."""
    if is_frozen(scenario, step, index) or is_empty(scenario, step, place, size):
        return False
    if rests(scenario, size, place, step, index):
        return False
    return scenario.variant != "unused" or uses(size, place, step, index)


def of_values(scenario: Scenario, index: int) -> int:
    """Return the number of the parameter whose values a parameter has: its own, unless it is the
    last one and tied to another."""
    tied = option(scenario, TIED)
    return int(tied) if tied and index == len(scenario.params) - 1 else index


def is_of_integers(spec: Param) -> bool:
    """Whether a parameter has a dtype of integers, and cannot require grad."""
    return not getattr(torch, spec.dtype).is_floating_point and "complex" not in spec.dtype


def _integers(spec: Param, number: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_009 * number + index)
    dtype = getattr(torch, spec.dtype)
    # Sums over up to eight ranks are exact in float64.
    least = max(torch.iinfo(dtype).min, -(2**50))
    largest = min(torch.iinfo(dtype).max, 2**50)
    numel = math.prod(spec.shape)
    anywhere = torch.randint(least, largest, (numel,), generator=generator)
    upper = torch.randint(largest // 2 + 1, largest + 1, (numel,), generator=generator)
    is_upper = torch.arange(numel) % 2 == 0
    return torch.where(is_upper, upper, anywhere).to(dtype).reshape(spec.shape)


def has_own_values(kind: str) -> bool:
    """Whether a kind of values of parameters is no kind of gradients."""
    return kind in ("limit", ROWS_KIND) or kind.startswith(NEAR_KIND)


def _near(source: Source, spec: Param, size: int, index: int) -> torch.Tensor:
    """Return values as ``near_kind`` has them, of a drawn sign each."""
    _, bits, exponent, base = source.kind.split("/")
    shared = torch.Generator().manual_seed(1_009 * int(base) + index)
    generator = torch.Generator().manual_seed(1_013 * source.number + index)
    shape = spec.shape
    integers = torch.randint(2 ** int(bits), 2 ** (int(bits) + 1), shape, generator=shared)
    own = (torch.randint(8, shape, generator=generator) + source.rank) % 8
    signs = 1 - 2 * torch.randint(2, shape, generator=shared)
    values = (signs * size * (integers + own)).double() * 2.0 ** int(exponent)
    return values.to(getattr(torch, spec.dtype))


def _rows(source: Source, spec: Param, size: int, index: int) -> torch.Tensor:
    """Return the first values of a matrix, with other ones in some of its inner rows."""
    dtype = getattr(torch, spec.dtype)
    values = gradient("crafted", spec.shape, dtype, world=size, rank=0, step=START, param=index)
    generator = torch.Generator().manual_seed(1_009 * source.number + index)
    rows, columns = spec.shape
    inner = 2 + torch.randperm(rows - 4, generator=generator)[: max(rows // 3, 1)]
    pairs = columns // 2
    more = 1 + (torch.randint(8, (len(inner), pairs), generator=generator) + source.rank) % 8
    more = more.to(dtype) * size / 16
    values[inner[:, None], 2 * torch.arange(pairs)] += more
    values[inner[:, None], 2 * torch.arange(pairs) + 1] -= more
    return values


def values_of(source: Source, spec: Param, size: int, index: int) -> torch.Tensor:
    """Return the values of a source."""
    dtype = getattr(torch, spec.dtype)
    if is_of_integers(spec):
        return _integers(spec, source.number, index)
    if source.kind.startswith(NEAR_KIND):
        return _near(source, spec, size, index)
    if source.kind == ROWS_KIND:
        return _rows(source, spec, size, index)
    kind = "normal" if source.kind == "limit" else source.kind
    made = gradient(
        kind,
        spec.shape,
        torch.float64 if source.kind == "limit" else dtype,
        world=size,
        rank=source.rank,
        step=source.number,
        param=index,
        exponent=spec.exponent,
        period=_PERIOD if source.kind == "limit" and math.prod(spec.shape) > _PERIOD else 0,
    )
    if source.kind != "limit":
        return made
    signs = 1 - 2 * (torch.arange(math.prod(spec.shape)) % 2).reshape(spec.shape)
    # The draws are below 6, so that j is below 96.
    integers = (made.abs() * 16).floor()
    return (signs * 32 * (_LIMIT - _LIMIT % size + size * integers)).to(dtype)
