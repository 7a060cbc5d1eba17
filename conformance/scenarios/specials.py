"""Kinds of gradients with NaN or infinities, and the places of these values.

The kind of a step may name a place: ``nan/1`` has NaN on rank 1 alone, ``nan/1/3`` in parameter 3
of rank 1 alone, and ``nan/1/3/-1`` in the last element of that parameter alone. ``nan/1/all`` and
``nan/1/3/all`` have NaN in every element there. Ranks are counted modulo the number of ranks, and
elements modulo the number of elements, so that one kind fits every world size and every shape.
``nan/1/3/80x17`` has NaN in 80 elements, whose places are drawn from the number 17. In
``nan/1/3/zeros17`` parameter 3 is mostly zeros on every rank, as in ``mostly_zero/17``; a part of
the other elements of rank 1, which is drawn from 1/16 to all, has NaN. Of an embedding whole rows
are zero. ``inf`` has the same forms.
"""

import math
import random
from dataclasses import dataclass, replace

import torch

from conformance.scenarios.dust import DUST
from conformance.scenarios.few_elements import FEW
from conformance.scenarios.growth import GROWN, LONE
from conformance.scenarios.mostly_zero import MOSTLY_ZERO
from conformance.scenarios.mostly_zero_values import is_kept
from conformance.scenarios.resting_parameter import RESTING
from conformance.scenarios.turns import TURN

# Every fifth element of a nan or inf step is special. Most elements still show the mean.
SPECIAL_EVERY = 5
OVERFLOWS = ("nan", "inf", "small_nan", "small_inf")
_ALL = "all"
_DRAWN = "x"
_ZEROS = "zeros"
_LEAST_PART = -4  # of the elements that are not zero, as a power of two


@dataclass(frozen=True)
class Place:
    """The place of the special values of one step.

    Attributes:
        rank: the one rank that has them.
        param: the one parameter that has them; None for all.
        element: the one element; None for several.
        every: the distance of several elements.
        count: of several elements at drawn places; 0 if none are drawn.
        number: what these places are drawn from.
        zeros: the number of the kind ``mostly_zero`` that the parameter's zeros are those of; None
            if it has no zeros.
    """

    rank: int
    param: int | None = None
    element: int | None = None
    every: int = SPECIAL_EVERY
    count: int = 0
    number: int = 0
    zeros: int | None = None


def base_kind(kind: str) -> str:
    """Return a kind of gradients without its place, and without the step whose parameters are used
    (``gradients.uses``)."""
    return kind.partition("/")[0].partition("@")[0]


def place_of(kind: str) -> Place | None:
    """Return the place that a kind names, or None if it names none."""
    base, *words = kind.split("/")
    if not words or base in (DUST, FEW, MOSTLY_ZERO, TURN, GROWN, LONE, RESTING):
        return None
    if words[-1].startswith(_ZEROS):
        zeros = int(words.pop().removeprefix(_ZEROS))
        rank, param = map(int, words)
        return Place(rank, param, zeros=zeros)
    if _DRAWN in words[-1]:
        count, number = map(int, words.pop().split(_DRAWN))
        rank, param = map(int, words)
        return Place(rank, param, count=count, number=number)
    place = Place(*(int(word) for word in words if word != _ALL))
    return replace(place, every=1) if words[-1] == _ALL else place


def without_element(kind: str) -> str:
    """Return a kind whose place names no element."""
    return "/".join(kind.split("/")[:3])


def with_drawn_elements(kind: str, count: int, number: int) -> str:
    """Return a kind whose place has so many elements, drawn from ``number``, in place of one."""
    words = kind.split("/")
    if len(words) < 4 or words[0] == FEW:
        return kind
    return "/".join([*words[:3], f"{count}{_DRAWN}{number}"])


def with_all_elements(kind: str, of_one_parameter: bool) -> str:
    """Return a kind with special values in all elements of its place's parameter, or of its rank.

    Args:
        kind: of any step.
        of_one_parameter: of the parameter of the place, not of all parameters of the rank.
    """
    words = kind.split("/")
    if len(words) < 4 or words[0] == FEW:
        return kind
    return "/".join([*words[: 3 if of_one_parameter else 2], _ALL])


def put_at_place(
    kind: str,
    values: torch.Tensor,
    place: Place,
    world: int,
    rank: int,
    param: int,
    columns: int = 0,
) -> torch.Tensor:
    """Put NaN or infinities into the values of one parameter of one rank, at a place.

    Infinities have alternating signs; a lone one has a sign that depends on its element. An
    embedding has ``columns``.
    """
    if place.zeros is not None and place.param == param:
        kept = is_kept(f"{MOSTLY_ZERO}/{place.zeros}", len(values), rank, param, columns)
        values = values.masked_fill(~kept, 0)
    if place.rank % world != rank or place.param not in (None, param) or not len(values):
        return values
    at = torch.arange(0, len(values), place.every)
    if place.element is not None:
        at = torch.tensor([place.element % len(values)])
    if place.count:
        numbers = random.Random(place.number)
        at = torch.tensor(numbers.sample(range(len(values)), min(place.count, len(values))))
    if place.zeros is not None:
        at = _some_of(values.nonzero()[:, 0], place.zeros)
    if base_kind(kind) == "nan":
        values[at] = math.nan
    else:
        values[at] = torch.where(at % 2 == 0, math.inf, -math.inf).double()
    return values


def _some_of(places: torch.Tensor, number: int) -> torch.Tensor:
    """Return a drawn part of some places, at least one; the first element if there are none."""
    numbers = random.Random(number)
    if not len(places):
        return torch.zeros(1, dtype=torch.int64)
    count = math.ceil(len(places) * 2.0 ** numbers.uniform(_LEAST_PART, 0))
    return places[numbers.sample(range(len(places)), count)]


def spread(kind: str, values: torch.Tensor, owners: torch.Tensor, world: int, rank: int) -> None:
    """Put NaN or infinities at every fifth element, on the rank that owns the element.

    Infinities are on the owner, on the rank after it, or on both with opposite signs, so that the
    mean is NaN.

    Args:
        kind: ``nan`` or ``inf``.
        values: the values of ``rank``, which are changed.
        owners: the rank that owns each fifth element.
        world: the number of ranks.
        rank: the rank.
    """
    at = torch.arange(0, len(values), SPECIAL_EVERY)
    is_owner = owners == rank
    if kind == "nan":
        values[at[is_owner]] = math.nan
        return
    is_next = ((owners + 1) % world == rank) & ~is_owner
    case = (at // SPECIAL_EVERY) % 4
    values[at[is_owner & ((case == 0) | (case == 3))]] = math.inf
    values[at[is_owner & (case == 1)]] = -math.inf
    values[at[is_next & (case == 2)]] = math.inf
    values[at[is_next & (case == 3)]] = -math.inf
