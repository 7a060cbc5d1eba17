"""The messages that ranks send each other through a quantized collective.

The message of each pair of ranks is different, so that a message that arrives at the wrong place
can be traced. The ranks that send a message and the controller that judges its arrival compute the
same bits from (source, destination, step, parameter). There are two kinds of message besides those
of ``gradients``:

uneven      normal, with magnitudes that differ between pairs, and between one run of 128 elements
            and the next: if a value is scaled by the largest value of another block, its error
            exceeds the bound.
special     NaN, infinities, zeros, ties and neighbours of a rounding to half precision, subnormals,
            the largest values.
zeros       0.0.
equal       1.375 times a power of two, the same in the whole message.
one_sided   of one sign, within a drawn part of their mean, as weights of norms and probabilities.
tiny        normal, times a drawn power of two (``collective_training.TINY``; in float16
            ``TINY_HALF``).
vast, minute, spread
            normal, times a drawn power of two, in ``spread`` one for each element: from 2**130 to
            2**1000, down to 2**-1000 from 2**-170, or all of them and 1. For float64 alone.
seldom      normal in one row of four or so, which are drawn, and 0.0 in the others.
patches     runs of 128 elements are zeros, equal, one-sided, tiny or normal, in a drawn order.
nan, infinite
            normal, with one NaN, or with an infinity of each sign, at drawn elements of one message
            of the call (``is_poisoned``).

In a scenario with a ``period`` normal values repeat a table.

In this module, ``place`` is a rank's number within its group.
"""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conformance.scenarios import collective_memory as memory
from conformance.scenarios import collective_uneven as uneven
from conformance.scenarios.collective import (
    CALLED,
    CALLS,
    HANDLES,
    MINUTE,
    OF_FLOAT64,
    OF_UNEVEN_SIZES,
    PLAIN,
    SPREAD,
    SUBGROUPS,
    SUMMING,
    TO_ALL,
    VAST,
    WITHOUT_NUMBERS,
)
from conformance.scenarios.collective_conditions import (
    MIXED,
    conditions_of,
    is_average,
    mixed_runs,
)
from conformance.scenarios.collective_training import (
    ALSO_OUTSIDE,
    OF_DTYPES,
    OF_LARGE,
    OF_OPERATIONS,
    OF_VIEWS,
    ON_GROUPS,
    ONE_SIDED,
    OPERATED_FORMS,
    SELDOM,
    TINY,
    TINY_HALF,
    UNEVEN_PARTS,
    VARYING,
)
from conformance.scenarios.gradients import gradient
from conformance.scenarios.model import Scenario

Pair = tuple[int, int]

# The variants whose calls are made in runs, and the most calls of a run, but for ``MIXED``.
IN_RUNS = (MIXED, UNEVEN_PARTS, OF_DTYPES, OF_LARGE, OF_VIEWS)
_TOGETHER = 3
POISON = ("nan", "infinite")

# A call as on a rank outside of the group comes while another one is under way.
MEANWHILE = "meanwhile"

# The uses of a list after a call with async_op=True that it was an argument of, before the wait.
CLEARED = "cleared"
REFILLED = "refilled"
REVERSED = "reversed"
_USES_OF_LISTS = (CLEARED, REFILLED, REVERSED, "")

# The group of a call.
OWN = "own"
TWIN = "twin"
WORLD = "world"

# The bits of the NaN that arithmetic on a CUDA device returns. A rounding to bfloat16 that adds to
# these bits and cuts off the last 16 overflows into the sign, and returns -0.0.
_NAN_OF_CUDA = 0x7FFFFFFF

_SPECIAL = (
    # Around the largest value of float16, and the largest value of float32.
    *(math.nan, math.inf, -math.inf, 0.0, -0.0),
    *(65504.0, -65504.0, 65519.0, 65520.0, -7e4, 3.4028234663852886e38, -3e38),
    # Around the smallest normal and subnormal values of float16 and bfloat16.
    *(2.0**-14, 2.0**-24, 3 * 2.0**-25, 2.0**-25, -(2.0**-26)),
    *(1e-40, -(2.0**-133), 2.0**-134, 1e-30),
    # Ties of the roundings to float16 and bfloat16, and ordinary values.
    *(1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8),
    *(0.1, -1 / 3, 256.0),
    math.nan,  # message() gives this one the bits of _NAN_OF_CUDA
)

# Kinds of message that are normal values, changed at drawn places.
_OF_DRAWN_PLACES = (
    *(SELDOM, "zeros", "equal", ONE_SIDED, "tiny", "patches", "nan", "infinite"),
    *OF_FLOAT64,
)
_VAST = (130, 1000)
_MINUTE = (-1000, -170)
_PATCH = 128
_PATCHES = ("zeros", "equal", ONE_SIDED, "tiny", "normal")


def form_of(scenario: Scenario, index: int) -> str:
    """Return the form of a parameter's call: one of ``CALLS``, or '' for the ordinary form."""
    if scenario.variant == OF_OPERATIONS:
        return OPERATED_FORMS[index]
    if scenario.variant == MIXED:
        return "average" if is_average(scenario, index) else ""
    if scenario.variant == UNEVEN_PARTS and scenario.options[0] == "all_to_all_single":
        return "uneven_splits"
    if scenario.name != CALLED.name:
        return ""
    return CALLS[scenario.options[0]][index]


def indices(scenario: Scenario, step: int) -> list[int]:
    """Return the parameters for which a call is made in a step."""
    if scenario.variant == "long":
        index = _draw_of(scenario, step).randrange(len(scenario.params))
        return [index]
    if scenario.variant == OF_OPERATIONS and scenario.options[0] not in SUMMING:
        return []  # It has no argument op.
    specs = list(enumerate(scenario.params))
    if scenario.variant == OF_LARGE and scenario.steps[step] in POISON:
        return [memory.middle_one(scenario)]
    if scenario.name == SUBGROUPS.name and step + 1 < len(scenario.steps):
        specs = specs[: len(PLAIN.params)]
    if scenario.steps[step] in OF_FLOAT64:
        return [index for index, spec in specs if spec.shape and spec.dtype == "float64"]
    takes_numbers = scenario.options[0] not in WITHOUT_NUMBERS
    return [index for index, spec in specs if spec.shape or takes_numbers]


def is_asynchronous(scenario: Scenario, step: int, index: int = 0) -> bool:
    """Whether a call has async_op=True."""
    if scenario.variant == "long":
        return _draw_of(scenario, step).random() < 0.4
    if scenario.variant == MIXED:
        return conditions_of(scenario, step, index).is_asynchronous
    if scenario.variant == ON_GROUPS:
        return index != _uses_of_groups(scenario, step).complete
    if scenario.variant == UNEVEN_PARTS and scenario.options[0] in OF_UNEVEN_SIZES:
        return _is_drawn_asynchronous(scenario, step, index)
    if scenario.variant == OF_DTYPES:
        return _is_drawn_asynchronous(scenario, step, index)
    if scenario.variant in (OF_VIEWS, OF_LARGE):
        return index in memory.asynchronous_calls(scenario, step)
    return scenario.variant in (HANDLES, "waited", "in_flight")


def _is_drawn_asynchronous(scenario: Scenario, step: int, index: int) -> bool:
    key = f"{scenario.session_seed}/asynchronous/{step}/{index}"
    return random.Random(key).random() < 0.5


def use_of_lists(scenario: Scenario, step: int, index: int) -> str:
    """Return the use of a call's lists before the wait for it: ``cleared``, ``refilled``,
    ``reversed``, or none, ''. Of four parameters in a row each has another one, which is drawn.
    """
    if scenario.variant not in (HANDLES, "in_flight", ON_GROUPS, MIXED, UNEVEN_PARTS):
        return ""
    draw = random.Random(f"{scenario.session_seed}/lists/{step}/{index // 4}")
    return draw.sample(_USES_OF_LISTS, 4)[index % 4]


def runs(scenario: Scenario, step: int) -> list[list[int]]:
    """Return the parameters of a step's calls in their order, in runs. The calls of a run are begun
    before the first wait.

    In other scenarios than ``MIXED`` a run is one call, or one to three with async_op=True.
    """
    if scenario.variant == MIXED:
        return mixed_runs(scenario, step, indices(scenario, step))
    found: list[list[int]] = []
    for index in indices(scenario, step):
        run = found[-1] if found else []
        of_run = all(is_asynchronous(scenario, step, one) for one in (*run, index))
        if run and of_run and len(run) < _TOGETHER:
            run.append(index)
        else:
            found.append([index])
    return found


@dataclass(frozen=True)
class _UsesOfGroups:
    """The calls of a step of ``ON_GROUPS``.

    Attributes:
        groups: the group of each call: ``own``, ``twin`` or ``world``.
        complete: the number of the call without async_op=True, which comes while others are under
            way; -1 if there is none.
    """

    groups: tuple[str, ...]
    complete: int


@functools.cache
def _uses_of_groups(scenario: Scenario, step: int) -> _UsesOfGroups:
    """Draw them. In every three steps each pair of groups is used once."""
    pairs = [(OWN, TWIN), (OWN, WORLD), (TWIN, WORLD)]
    random.Random(f"{scenario.session_seed}/pairs of groups/{step // 3}").shuffle(pairs)
    draw = random.Random(f"{scenario.session_seed}/groups/{step}")
    calls = len(scenario.params)
    pair = draw.sample(pairs[step % 3], 2)
    groups = [*pair, *draw.choices(pair, k=calls)][:calls]
    complete = draw.randrange(1, calls) if calls > 2 and step % 3 == 2 else -1
    return _UsesOfGroups(tuple(groups), complete)


def kind_of_group(scenario: Scenario, step: int, index: int) -> str:
    """Return the group of a call: ``own`` of the rank, ``twin``, or ``world``."""
    return _uses_of_groups(scenario, step).groups[index] if scenario.variant == ON_GROUPS else OWN


def group_of(scenario: Scenario, world: int, rank: int, step: int, index: int) -> tuple[int, ...]:
    """Return the global ranks of a call's group."""
    kind = kind_of_group(scenario, step, index)
    if kind == WORLD:
        return tuple(range(world))
    return (scenario.twin_group_of if kind == TWIN else scenario.group_of)(rank, world)


def order_of_waits(
    scenario: Scenario, world: int, rank: int, step: int, indices: Sequence[int]
) -> list[int]:
    """Return the numbers of calls that are under way together in the order in which a rank waits
    for them.

    The order is drawn. Of each group of ranks that make calls together, some wait in this order and
    the others in the opposite one, so that no two calls are waited for in one order by all.
    Calls of one shape are waited for once more, in their own order.

    Args:
        indices: the parameters of the calls.
    """
    forward = list(range(len(indices)))
    is_in_runs = scenario.variant in IN_RUNS
    if scenario.variant not in (HANDLES, "in_flight", ON_GROUPS) and not is_in_runs:
        return forward[::-1]
    of_run = f"/{indices[0]}" if is_in_runs else ""
    draw = random.Random(f"{scenario.session_seed}/waits/{step}{of_run}")
    order = draw.sample(forward, len(forward))
    if (_side_of(scenario, world, rank) + step) % 2:
        order.reverse()
    return [*order, *forward] if scenario.variant == "in_flight" else order


def _side_of(scenario: Scenario, world: int, rank: int) -> int:
    """Return 0 or 1: both are among the ranks of each group."""
    own = scenario.group_of(rank, world)
    if not scenario.twin_groups:
        return own.index(rank) % 2
    # On a mesh of 2 x 2 ranks, the one that shares no group with rank 0 is on its side.
    return int(rank != 0 and 0 in (*own, *scenario.twin_group_of(rank, world)))


def _draw_of(scenario: Scenario, step: int) -> random.Random:
    return random.Random(f"{scenario.session_seed}/{scenario.name}/{step}")


def outside_too(scenario: Scenario, step: int, index: int) -> str:
    """Return when a call is also made as on a rank outside of the group: ``before`` the call,
    ``meanwhile``, if it may have async_op=True, or never, ''.
    """
    if scenario.variant != ALSO_OUTSIDE:
        return ""
    draw = random.Random(f"{scenario.session_seed}/outside/{step}/{index}")
    return draw.choice(("before", MEANWHILE, ""))


def keeps_objects(scenario: Scenario) -> bool:
    """Whether the errors of one object for each shape are followed from step to step."""
    variants = ("recovering", VARYING, ALSO_OUTSIDE, MIXED)
    return "constant" in scenario.steps or scenario.variant in variants


def source_of(scenario: Scenario, size: int, step: int, index: int) -> int:
    """Return the place of the rank that scatters."""
    if scenario.order != "free" or keeps_objects(scenario) or scenario.variant == "long":
        # Rank 0 has to go first, or the errors of one rank are followed from step to step.
        return 0
    return (step + index) % size


def sent(scenario: Scenario, size: int, place: int, step: int, index: int) -> list[Pair]:
    """Return the messages that a rank passes to a call, in order, as places (from, to).

    A message for all ranks has the destination 0.
    """
    collective = scenario.options[0]
    if collective in TO_ALL:
        return [(place, 0)]
    if collective == "scatter" and place != source_of(scenario, size, step, index):
        return []
    return [(place, to) for to in range(size)]


def received(
    scenario: Scenario, size: int, place: int, step: int, index: int
) -> list[tuple[Pair, ...]]:
    """Return the messages of each output of a rank, in order, as places (from, to).

    An output is one message, or the sum of its messages.
    """
    collective = scenario.options[0]
    if collective == "scatter":
        return [((source_of(scenario, size, step, index), place),)]
    destination = 0 if collective in TO_ALL else place
    pairs = [(source, destination) for source in range(size)]
    return [tuple(pairs)] if collective in SUMMING else [(pair,) for pair in pairs]


def shape_of(
    scenario: Scenario, size: int, step: int, index: int, source: int, to: int
) -> tuple[int, ...]:
    """Return the shape of a message."""
    shape = scenario.params[index].shape
    form = form_of(scenario, index)
    if scenario.variant == UNEVEN_PARTS and scenario.options[0] in OF_UNEVEN_SIZES:
        return (uneven.rows_of(scenario, size, step, index, source, to), *shape[1:])
    if not form.endswith("splits"):
        return shape
    # Every rank sends the same number of rows in all, and a different number to each peer. A
    # collective that ignores the splits and cuts evenly still runs, but delivers rows that belong
    # to another rank.
    rows = 2 * ((source + to) % size) + (form == "splits")
    return (rows, *shape[1:])


def is_poisoned(scenario: Scenario, size: int, step: int, source: int, to: int) -> bool:
    """Whether a message has the NaN or the infinities of its step.

    The rank that sends it, and the one that receives it, are drawn. A scatter has one sender, and
    some collectives send one message to all ranks.
    """
    draw = random.Random(f"{scenario.session_seed}/poisoned/{step}")
    poisoned_source = draw.randrange(size)
    poisoned_destination = draw.randrange(size)
    collective = scenario.options[0]
    if collective in TO_ALL:
        return source == poisoned_source
    if collective == "scatter":
        return to == poisoned_destination
    return (source, to) == (poisoned_source, poisoned_destination)


def message(
    scenario: Scenario, size: int, step: int, index: int, source: int, to: int
) -> torch.Tensor:
    """Return the message from one place of a group to another, in C order."""
    if scenario.period:
        # A table makes it cheap, and it is too large to be kept.
        return _make_message(scenario, size, step, index, source, to)
    return _keep_message(scenario, size, step, index, source, to)


@functools.lru_cache(maxsize=512)
def _keep_message(
    scenario: Scenario, size: int, step: int, index: int, source: int, to: int
) -> torch.Tensor:
    return _make_message(scenario, size, step, index, source, to)


def _make_message(
    scenario: Scenario, size: int, step: int, index: int, source: int, to: int
) -> torch.Tensor:
    spec = scenario.params[index]
    kind = scenario.steps[step]
    pair = 16 * source + to
    dtype = getattr(torch, spec.dtype)
    shape = shape_of(scenario, size, step, index, source, to)
    count = math.prod(shape)
    if dtype.is_complex:
        # Both parts of an element, one after the other.
        count *= 2
    elif not dtype.is_floating_point:
        # Odd numbers above 2**20 need more bits than any narrow dtype has.
        return (2**20 + 1 + 2 * (1000 * pair + torch.arange(count))).to(dtype).reshape(shape)
    if kind == "special":
        values = torch.tensor(_SPECIAL)
        values[-1:].view(torch.int32).fill_(_NAN_OF_CUDA)
        return values.roll(source + to).reshape(shape)
    values = gradient(
        "normal" if kind in ("uneven", *_OF_DRAWN_PLACES) else kind,
        (count,),
        torch.float64,
        world=1,
        rank=pair,
        step=step,
        param=index,
        exponent=spec.exponent_at(step),
        period=scenario.period,
    )
    if scenario.period and spec.exponents:
        # A table is the same for all exponents.
        values = values * 2.0 ** spec.exponent_at(step)
    if scenario.variant in (OF_DTYPES, OF_OPERATIONS, UNEVEN_PARTS):
        # A float64 may be rounded to a float32 on the way to a narrow dtype, or may not be.
        values = values.float().double()
    if kind == SELDOM and shape:
        rows = shape[0]
        draw = random.Random(f"{scenario.session_seed}/rows/{step}/{index}/{pair}")
        used = torch.tensor([draw.random() < 0.25 for _ in range(rows)])
        used[draw.randrange(rows)] = True
        values = values * used.repeat_interleave(count // rows)
    if kind == "uneven":
        of_pair = 2.0 ** (2 * ((5 * source + 3 * to + step) % 4))
        of_block = 2.0 ** (6 - 3 * (torch.arange(count) // 128 % 3))
        values = values * of_pair * of_block
    elif kind in _OF_DRAWN_PLACES and kind != SELDOM:
        draw = random.Random(f"{scenario.session_seed}/{kind}/{step}/{index}/{pair}")
        poisoned = is_poisoned(scenario, size, step, source, to)
        exponents = TINY_HALF if dtype is torch.float16 else TINY
        values = _changed(values, kind, poisoned, draw, exponents)
    if dtype.is_complex:
        return torch.view_as_complex(values.to(dtype.to_real()).reshape(*shape, 2))
    return values.to(dtype).reshape(shape)


def as_reals(message: torch.Tensor) -> torch.Tensor:
    """Return the elements of a message, flat; of complex ones both parts, as records have them."""
    return (torch.view_as_real(message) if message.is_complex() else message).reshape(-1)


def _changed(
    values: torch.Tensor,
    kind: str,
    poisoned: bool,
    draw: random.Random,
    exponents: tuple[int, int],
) -> torch.Tensor:
    """Return normal values as a kind of ``_OF_DRAWN_PLACES`` changes them."""
    if kind == "zeros":
        return torch.zeros_like(values)
    if kind == "equal":
        return torch.full_like(values, draw.choice((1.375, -1.375)) * 2.0 ** draw.randint(-6, 6))
    if kind == ONE_SIDED:
        mean = draw.choice((1, -1)) * 2.0 ** draw.randint(-6, 6)
        return mean * (1 + 2.0 ** draw.uniform(-6, -2) * values.clamp(-3, 3))
    if kind == "tiny":
        return values * 2.0 ** draw.randint(*exponents)
    if kind in OF_FLOAT64:
        ranges = {VAST: [_VAST], MINUTE: [_MINUTE], SPREAD: [_VAST, _MINUTE, (0, 0)]}[kind]
        drawn = [draw.randint(*draw.choice(ranges)) for _ in values]
        if kind != SPREAD:
            drawn = drawn[:1] * len(drawn)
        return torch.ldexp(values, torch.tensor(drawn))
    if kind == "patches":
        first = draw.randrange(len(_PATCHES))
        parts = values.split(_PATCH)
        changed = [
            _changed(part, _PATCHES[(first + place) % len(_PATCHES)], poisoned, draw, exponents)
            for place, part in enumerate(parts)
        ]
        return torch.cat(changed)
    if poisoned and kind in POISON:
        # A number has one element.
        places = draw.sample(range(len(values)), min(len(values), 2))
        poison = (math.nan,) if kind == "nan" else (math.inf, -math.inf)
        values = values.clone()
        for place, value in zip(places, poison, strict=False):
            values[place] = value
    return values
