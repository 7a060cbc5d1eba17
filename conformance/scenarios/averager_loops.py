"""The scenarios for averagers in ordinary training loops: gradients that overflow, ranks that are
close to each other, and calls without anything to train.

Their numbers are drawn from the session's seed, and their lengths follow the claimed schedule.
"""

import random
from dataclasses import dataclass, replace

from conformance.scenarios.averager import FORMS, PLAIN, UNUSED
from conformance.scenarios.averager_training import IDLE, IDLE_FROZEN, IDLE_NONE, with_option
from conformance.scenarios.averaging_schedule import HELD, MAX_STEPS, QUIET, Schedule, lengthened
from conformance.scenarios.model import Param, Scenario

OVERFLOWS = replace(
    PLAIN,
    name="averager_overflows",
    summary="random values; in each average some gradients, of a drawn rank or of all, are not "
    "finite, or as large as their dtype allows",
    steps=("normal",) * 6,
    world_sizes=(2,),
    variant="overflows",
)

NEAR_KIND = "near"

CLOSE = replace(
    PLAIN,
    name="averager_close",
    summary="values of ranks that differ by a few units in the last places of crafted numbers, "
    "relatively by 1/20 to 1/2,000,000, and from the average before by as little in every other "
    "average; some are as small as 1e-8",
    steps=(NEAR_KIND,) * 6,
    world_sizes=(2,),
)

ROWS_KIND = "rows"

# Embeddings are trained in few rows, and rows before a LayerNorm keep their sum.
ROWS = replace(
    PLAIN,
    name="averager_rows",
    summary="matrices in which drawn rows alone move, neither the first two nor the last two, and "
    "whose rows keep their sums; between two of these steps nothing moves",
    params=(Param((40, 6)), Param((25, 8)), Param((5, 3))),
    steps=(ROWS_KIND, ROWS_KIND, HELD, ROWS_KIND),
    world_sizes=(2,),
)

ALL = (OVERFLOWS, CLOSE, ROWS, IDLE)


def averages_of(schedule: Schedule, count: int) -> list[int]:
    """Return the steps of the first averages of the shortest period, at most ``count``."""
    period = min(schedule.periods)
    dues = [schedule.first(period)]
    while len(dues) < count:
        due = schedule.next(period, dues[-1] + 1)
        if due >= MAX_STEPS:
            break
        dues.append(due)
    return dues


def averages_alone(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Let a scenario have as many averages as it is written with steps, and record these alone."""
    dues = averages_of(schedule, len(scenario.steps))
    steps = lengthened(scenario.steps, schedule, alone=True, also=dues)
    return replace(scenario, steps=steps)


# --- gradients that overflow ------------------------------------------------------------------

# The ranks, and the gradients among those of a rank, that are not finite in an average.
_EXTENTS = tuple(
    (ranks, elements) for ranks in ("one", "all") for elements in ("element", "parameter", "all")
)
_VALUES = ("inf", "-inf", "nan", "nan", "inf", "largest")


@dataclass(frozen=True)
class Overflow:
    """The overflow of a gradient.

    Attributes:
        value: ``inf``, ``-inf``, ``nan``, or ``largest``, the largest finite number, whose square
            overflows.
        element: the only element that has it, as a share of the elements; None if all have it.
    """

    value: str
    element: float | None


def overflow(scenario: Scenario, size: int, place: int, step: int, index: int) -> Overflow | None:
    """Return the overflow of a parameter's gradient on a rank at a step, or None.

    Args:
        size: the size of the rank's group.
        place: the rank's number within the group.
    """
    if scenario.variant != OVERFLOWS.variant or scenario.steps[step] == QUIET:
        return None
    number = _number_of(scenario, step)
    order = random.Random(f"{scenario.session_seed}/overflows")
    extents = order.sample(_EXTENTS, len(_EXTENTS))
    values = order.sample(_VALUES, len(_VALUES))
    ranks, elements = extents[number % len(extents)]
    draw = random.Random(f"{scenario.session_seed}/overflows/{step}")
    overflows_at = draw.randrange(size)
    parameter = draw.randrange(len(scenario.params))
    element = draw.random()
    if ranks == "one" and place != overflows_at:
        return None
    if elements != "all" and index != parameter:
        return None
    return Overflow(values[number % len(values)], element if elements == "element" else None)


def _number_of(scenario: Scenario, step: int) -> int:
    """Return the number of ordinary steps before a step."""
    return sum(kind != QUIET for kind in scenario.steps[:step])


# --- ranks that are close to each other -------------------------------------------------------

_LEAST_BITS = 7
# Powers of two about which values lie.
_TINY = (-27, -10)
_ORDINARY = (-3, 10)


def near_kind(scenario: Scenario, step: int, index: int, size: int) -> str:
    """Return the kind of values of a parameter whose ranks are close to each other.

    It is ``near/BITS/EXPONENT/STEP``: W (K + k) 2**EXPONENT with the size W of the group, an
    integer K from 2**BITS to twice as much, the same on all ranks, and k below 8, another one on
    each. A sum over the group is an integer below 2**24 times the power of two: any right way to
    the mean is exact in float32.

    Two steps in a row have the same K, which is drawn from STEP, the first of the two. So the
    values of the second one are close to the mean of the first one, as after small steps.

    In a third of the steps distances and magnitudes are drawn for each parameter. In the others
    all ranks are as close as possible in all parameters, which are all tiny in half of these.
    """
    number = _number_of(scenario, step) // 2
    ordinary = [at for at, kind in enumerate(scenario.steps) if kind != QUIET]
    step = ordinary[2 * number]
    most = 22 - 2 * (size - 1).bit_length()
    count = len(scenario.params)
    order = random.Random(f"{scenario.session_seed}/{scenario.name}/near")
    steps = order.sample(("each", "ordinary", "tiny"), 3)
    chosen = steps[number % len(steps)]
    draw = random.Random(f"{scenario.session_seed}/{scenario.name}/near/{step}")
    places = draw.sample(range(count), count)
    share = (places[index] + draw.random()) / count
    bits = most - draw.randrange(3)
    if chosen == "each":
        bits = _LEAST_BITS + int(share * (most + 1 - _LEAST_BITS))
        chosen = ("ordinary", "tiny")[places[index] % 2]
    magnitude = round(draw.uniform(*(_TINY if chosen == "tiny" else _ORDINARY)))
    return f"{NEAR_KIND}/{bits}/{magnitude - bits - size.bit_length()}/{step}"


# --- calls without anything to train ----------------------------------------------------------


def idle(
    scenario: Scenario, schedule: Schedule, draw: random.Random, *, between_only: bool
) -> Scenario:
    """Draw the steps in which all parameters are frozen, or none are given.

    They lie within the warm-up, between the first two averages and between the next two. Between
    two averages there are fewer than a period, so that each lost count shows. Then two averages are
    due in such a step each.

    Args:
        between_only: let no such step have an average.
    """
    period = min(schedule.periods)
    dues = averages_of(schedule, 7)
    found: dict[str, list[int]] = {IDLE_FROZEN: [], IDLE_NONE: []}
    kinds = draw.sample(sorted(found), 2)
    for due, kind in zip(dues, kinds, strict=False):
        if period > 1:
            count = draw.randint(1, min(3, period - 1))
            found[kind] += range(due + 1, due + 1 + count)
    if dues[0] > 1:
        found[draw.choice(kinds)].append(draw.randrange(1, dues[0]))
    if not between_only:
        draw.shuffle(kinds)
        # An ordinary average follows each.
        for due, kind in zip(dues[3:-1:2], kinds, strict=False):
            found[kind].append(due)
    at = {step for steps in found.values() for step in steps}
    steps = lengthened(scenario.steps, schedule, also=(*at, *dues))
    scenario = replace(scenario, steps=steps)
    for kind, chosen in found.items():
        scenario = with_option(scenario, kind, " ".join(map(str, sorted(chosen))))
    return scenario


# --- the call ---------------------------------------------------------------------------------


def is_grad_mode_off(scenario: Scenario, step: int) -> bool:
    """Whether the trainer makes a step's call under ``torch.no_grad()``, as it may."""
    if scenario.name not in (PLAIN.name, FORMS.name, UNUSED.name):
        return False
    return random.Random(f"{scenario.session_seed}/{scenario.name}/no_grad/{step}").random() < 0.5


def is_of_subclass(scenario: Scenario, index: int) -> bool:
    """Whether a parameter is of a subclass of ``torch.nn.Parameter``; a drawn half of them is."""
    if scenario.name != FORMS.name:
        return False
    trained = [place for place, spec in enumerate(scenario.params) if not spec.frozen]
    draw = random.Random(f"{scenario.session_seed}/{scenario.name}/subclass")
    return index in draw.sample(trained, len(trained) // 2)


def freezes_any(scenario: Scenario, draw: random.Random) -> Scenario:
    """Put the frozen parameter of ``FORMS`` at a drawn place; the third parameter, which is given
    twice, is another one.
    """
    *params, frozen = scenario.params
    place = draw.choice([place for place in range(len(scenario.params)) if place != 2])
    params.insert(place, frozen)
    return replace(scenario, params=tuple(params))
