"""Scenarios for optimizer wrappers: other backwards than one before each step, and gradients of
zeros.

Gradients of several backwards add up in ``p.grad``, which may be changed before the step: scaled,
as by clipping; zeros in some rows, as of an embedding of which the new tokens alone are trained;
other values in each element, as masks; values added to it, as noise or a decay. ``zero_grad()`` of
the optimizer or the model, or ``p.grad = None``, drops those of a backward whose step is given up.
A parameter whose gradients are zeros on all ranks is stepped, with its momentum, while one without
a gradient is not (torch documentation, ``torch.autograd.backward`` and
``torch.optim.Optimizer.zero_grad``). If an optimizer averages gradients by ``synchronize()``, as
Horovod's does, a batch may be given up after that: the next batch's gradients are averaged all the
same. So are those that one more backward adds, as of a penalty that is computed after the gradients
were looked at, unless the step is within ``skip_synchronize()``. Gradients that
``torch.autograd.grad`` returns, as of gradient surgery, meta-learning or clipping by samples, are
accumulated by no backward: the trainer writes them to ``p.grad``, and ``step()`` reads that (torch
documentation, ``torch.autograd.grad``). All numbers are drawn from the session's seed.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from conformance.scenarios import optimizer_wide_gradients
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.optimizer import PLAIN, START, UNUSED
from conformance.scenarios.optimizer_checkpoints import CHECKPOINTED
from conformance.scenarios.optimizer_in_half import HALF
from conformance.scenarios.optimizer_wide_gradients import WIDE
from conformance.scenarios.resting_parameter import RESTING
from conformance.scenarios.seeds import generator

ACCUMULATED = replace(
    PLAIN,
    name="optimizer_accumulated",
    summary="some steps come after two or three backwards, whose gradients add up; each has "
    "gradients of other parameters; before most steps p.grad is changed, in place, in .data or by "
    "another tensor: it is scaled, has rows of zeros, is scaled by elements, or gets a sum; "
    "gradients arrive in drawn orders, as in `optimizer_own`",
    params=(*PLAIN.params, Param((7,)), Param((5, 3))),
    steps=("crafted",) * 14,
    world_sizes=(2,),
    variant="accumulated",
)

ACCUMULATED_BFLOAT16 = replace(
    ACCUMULATED,
    name="optimizer_accumulated_bfloat16",
    summary="the scenario `optimizer_accumulated` with random gradients and parameters of bfloat16",
    params=tuple(replace(param, dtype="bfloat16") for param in PLAIN.params),
    steps=("normal",) * len(ACCUMULATED.steps),
    variant="accumulated_half",
)

ACCUMULATED_FLOAT16 = replace(
    ACCUMULATED_BFLOAT16,
    name="optimizer_accumulated_float16",
    summary="the scenario `optimizer_accumulated` with random gradients and parameters of float16",
    params=tuple(replace(param, dtype="float16") for param in PLAIN.params),
)

DISCARDED = replace(
    ACCUMULATED,
    name="optimizer_discarded",
    summary="before most steps zero_grad() of the optimizer or the model, or p.grad = None, drops "
    "the gradients of a backward, some after synchronize() has averaged these, and some after the "
    "backward has raised an error halfway, on all ranks; then one parameter has no gradient",
    params=PLAIN.params,
    steps=("crafted",) * 12,
    variant="discarded",
)

ASSIGNED = replace(
    ACCUMULATED,
    name="optimizer_assigned",
    summary="in most steps no backward accumulates the gradients of some parameters, or of all: "
    "each rank writes its own to p.grad, in place, in .data or as another tensor; some of them "
    "come from torch.autograd.grad",
    params=PLAIN.params,
    steps=("crafted",) * 12,
    variant="assigned",
    observe=replace(ACCUMULATED.observe, bytes_sent=True),
)

ASSIGNED_LAID_OUT = replace(
    ASSIGNED,
    name="optimizer_assigned_laid_out",
    summary="the same, and gradients have other memory layouts than their parameters: transposed "
    "strides, or slices of one flat vector, as drawn for each parameter and step",
)

EARLY = replace(
    ACCUMULATED,
    name="optimizer_synchronized_early",
    summary="synchronize() averages gradients, if the optimizer has it; one more backward adds to "
    "some, and in some steps brings the first gradients of other parameters; step() averages all, "
    "or synchronize() does so again, as drawn",
    params=PLAIN.params,
    steps=("crafted",) * 6,
    variant="synchronized_early",
)

IN_HALF = (ACCUMULATED_BFLOAT16, ACCUMULATED_FLOAT16)
ALL = (
    *(ACCUMULATED, *IN_HALF, DISCARDED, ASSIGNED, ASSIGNED_LAID_OUT, EARLY, WIDE),
    CHECKPOINTED,
)
_ACCUMULATED = tuple({scenario.variant for scenario in (ACCUMULATED, *IN_HALF)})

# Gradients that are dropped are made like those of these steps, which no scenario reaches.
DROPPED = START + 100

# The ways in which gradients are dropped.
BY_OPTIMIZER = "optimizer.zero_grad()"
BY_MODEL = "model.zero_grad()"
BY_NONE = "p.grad = None"
WAYS = (BY_OPTIMIZER, BY_MODEL, BY_NONE)

# Values that are added to gradients are made like the gradients of these steps.
ADDED = START + 200

# The ways in which gradients are changed. The second one does not change a tensor's version.
IN_PLACE = "p.grad, in place"
IN_DATA = "p.grad.data, in place"
NEW_TENSOR = "another tensor as p.grad"
CHANGED_IN = (IN_PLACE, IN_DATA, NEW_TENSOR)

# The factors of the gradients in the first steps of the drawn order: powers of two, so that
# products are exact. Steps of several backwards take turns with steps of one.
_FACTORS = (0.5, 2.0, 0.25, 0.5, 2.0, 0.25)
# The factors of single elements.
_OF_ELEMENTS = (0.0, 0.5, 1.0, 2.0)


class Changing(Enum):
    """A change of gradients before a step."""

    SCALED = "multiplied by a factor"
    ROWS = "zeros in some rows"
    ELEMENTS = "each element multiplied by its own factor, some by 0"
    SUM = "values added"


# The changes that are no factor: they come in the next steps of the drawn order.
_OTHERS = (Changing.ROWS, Changing.ELEMENTS, Changing.SUM)


@dataclass(frozen=True)
class Change:
    """A change of all gradients between the last backward and a step, the same on all ranks.

    All changes are linear: it makes no difference whether gradients are averaged before or after.

    Attributes:
        kind: the change.
        way: the tensor that is changed.
        factor: of all elements.
    """

    kind: Changing
    way: str
    factor: float = 1.0


# All shares of a gradient are powers of two, so that every partial sum is exact.
_SHARES = {1: (1.0,), 2: (0.5, 0.5), 3: (0.25, 0.5, 0.25)}


def shares(scenario: Scenario, step: int, index: int) -> tuple[float, ...]:
    """Return the share of a parameter's gradient in each backward of a step; they add up to 1.

    Half of the steps have one backward. In the others every backward has a gradient of some
    parameter, and one parameter has a gradient in all of them.
    """
    if scenario.variant == EARLY.variant:
        return _shares_of_two(scenario, step)[index]
    if scenario.variant not in _ACCUMULATED:
        return (1.0,)
    number = _place_of(scenario, step)
    if number % 2:
        return (1.0,)
    count = 2 + number // 2 % 2
    draw = generator(scenario, f"backwards of {step}")
    whole = draw.randrange(len(scenario.params))
    chosen = [
        sorted(draw.sample(range(count), count if place == whole else draw.randint(1, count)))
        for place in range(len(scenario.params))
    ][index]
    parts = [0.0] * count
    for backward, share in zip(chosen, _SHARES[len(chosen)], strict=True):
        parts[backward] = share
    return tuple(parts)


def _shares_of_two(scenario: Scenario, step: int) -> list[tuple[float, ...]]:
    """Return the shares of all gradients in two backwards: there are gradients of both, and of the
    first one alone; in some steps also of the second one alone.
    """
    forms: list[tuple[float, ...]] = [(0.5, 0.5), (1.0, 0.0)]
    if _place_of(scenario, step) // 2 % 2 == 0:
        forms.append((0.0, 1.0))
    draw = generator(scenario, f"backwards of {step}")
    parts = forms + draw.choices(forms, k=len(scenario.params) - len(forms))
    draw.shuffle(parts)
    return parts


def averages_early(scenario: Scenario) -> bool:
    """Whether ``synchronize()`` averages gradients after the first backward, if there is one."""
    return scenario.variant == EARLY.variant


def change_before(scenario: Scenario, step: int) -> Change | None:
    """Return the change of gradients before a step, if there is one.

    Each kind of change, and each way, comes before a step of one backward and before a step of
    several.
    """
    if scenario.variant not in _ACCUMULATED:
        return None
    place = _place_of(scenario, step)
    several = place % 2
    if place < len(_FACTORS):
        ways = generator(scenario, f"scalings {several}").sample(CHANGED_IN, len(CHANGED_IN))
        return Change(Changing.SCALED, ways[place // 2], _FACTORS[place])
    number = (place - len(_FACTORS)) // 2
    if number >= len(_OTHERS):
        return None
    ways = generator(scenario, f"changes {several}").sample(CHANGED_IN, len(CHANGED_IN))
    return Change(_OTHERS[number], ways[number])


def zero_rows(scenario: Scenario, step: int, index: int) -> slice:
    """Return the rows of a gradient that become zeros; none of a gradient without dimensions."""
    shape = scenario.params[index].shape
    if not shape:
        return slice(0, 0)
    draw = generator(scenario, f"rows of p{index} in {step}")
    count = draw.randint(1, shape[0] - 1)
    begin = draw.randint(0, shape[0] - count)
    return slice(begin, begin + count)


def factors_of(scenario: Scenario, step: int, index: int) -> list[float]:
    """Return the factors of all elements of a gradient before a step, in C order."""
    shape = scenario.params[index].shape
    numel = math.prod(shape)
    change = change_before(scenario, step)
    if change is None or change.kind is Changing.SUM:
        return [1.0] * numel
    if change.kind is Changing.SCALED:
        return [change.factor] * numel
    if change.kind is Changing.ELEMENTS:
        draw = generator(scenario, f"factors of p{index} in {step}")
        return draw.choices(_OF_ELEMENTS, k=numel)
    rows = zero_rows(scenario, step, index)
    width = math.prod(shape[1:])
    factors = [1.0] * numel
    factors[rows.start * width : rows.stop * width] = [0.0] * (rows.stop - rows.start) * width
    return factors


def _place_of(scenario: Scenario, step: int) -> int:
    """Return the place of a step in the drawn order of steps."""
    order = generator(scenario, "steps").sample(range(len(scenario.steps)), len(scenario.steps))
    return order.index(step)


@dataclass(frozen=True)
class Drop:
    """The gradients of a backward that are dropped before those of a step come.

    Attributes:
        way: how they are dropped.
        left_out: the parameter that has no gradient in the step.
        is_averaged: whether ``synchronize()`` averages the gradients before they are dropped, if
            the optimizer has it, as in a loop that looks at the norm of the mean gradient.
        enters: whether ``skip_synchronize()`` is entered then, and left without a step, as by a
            GradScaler that skips it.
        averages_after: whether the step that follows is within ``skip_synchronize()``, after a
            ``synchronize()`` of its own.
        breaks_off: the parameter at whose gradient the backward raises an error on all ranks, as
            if memory ran out; None if the backward ends.
    """

    way: str
    left_out: int
    is_averaged: bool
    enters: bool
    averages_after: bool
    breaks_off: int | None = None


def drop_before(scenario: Scenario, step: int) -> Drop | None:
    """Return the gradients that are dropped before a step, if some are."""
    if scenario.variant != DISCARDED.variant:
        return None
    return _drops(scenario).get(step)


def averages_first(scenario: Scenario, step: int) -> bool:
    """Whether ``synchronize()`` averages gradients before a step, if the optimizer has it.

    After a backward that has followed an earlier average, it does so before half of the steps.
    """
    if averages_early(scenario):
        return _place_of(scenario, step) % 2 == 1
    drop = drop_before(scenario, step)
    is_changed = change_before(scenario, step) is not None
    return is_changed or (drop is not None and drop.averages_after)


def is_left_out(scenario: Scenario, step: int, index: int) -> bool:
    """Whether a parameter has no gradient in a step, after those of a backward were dropped."""
    drop = drop_before(scenario, step)
    return drop is not None and drop.left_out == index


def _drops(scenario: Scenario) -> Mapping[int, Drop]:
    """Return the dropped gradients, by the step before which they are.

    One of the steps is the first, in which no parameter has a state. Gradients are dropped in each
    way three times: twice after they were averaged, with each form of the next step, and once
    before. Of these last three, two backwards raise an error, after one gradient at least.
    """
    draw = generator(scenario, "discards")
    forms = [(way, *form) for way in WAYS for form in ((True, True), (True, False), (False, False))]
    draw.shuffle(forms)
    steps = (0, *draw.sample(range(1, len(scenario.steps)), len(forms) - 1))
    entered = draw.randrange(2)
    breaking = generator(scenario, "broken backwards")
    ends = breaking.choice(WAYS)
    drops = {}
    for step, (way, is_averaged, averages_after) in zip(steps, forms, strict=True):
        left_out = draw.randrange(len(scenario.params))
        enters = is_averaged and (WAYS.index(way) + averages_after) % 2 == entered
        # The gradient of the last parameter comes first.
        at = breaking.randrange(len(scenario.params) - 1)
        breaks_off = None if is_averaged or way == ends else at
        drops[step] = Drop(way, left_out, is_averaged, enters, averages_after, breaks_off)
    return drops


class Layout(Enum):
    """The memory layout of a gradient that a trainer writes."""

    OWN = "that of its parameter"
    TRANSPOSED = "its dimensions in the other order in memory"
    SLICE = "a contiguous slice of one flat vector, in which others lie beside it"


def layout_of(scenario: Scenario, step: int, index: int) -> Layout:
    """Return the layout of a gradient that is written, the same on all ranks."""
    if scenario.name != ASSIGNED_LAID_OUT.name:
        return Layout.OWN
    return generator(scenario, f"layout of p{index} in {step}").choice(list(Layout))


@dataclass(frozen=True)
class Assigned:
    """Gradients that a trainer writes to ``p.grad`` itself, each rank its own.

    Attributes:
        indices: their parameters; those of the others come from a backward.
        way: the tensor that is written.
        is_first: whether the gradients are written before the backward of the others.
        is_computed: whether ``torch.autograd.grad`` has computed them.
    """

    indices: tuple[int, ...]
    way: str
    is_first: bool
    is_computed: bool


def assigned_before(scenario: Scenario, step: int) -> Assigned | None:
    """Return the gradients that are written before a step, if some are.

    Those of all parameters are written in each way, and those of some in each way, before the
    backward of the others and after it. In three steps all come from a backward. The first step has
    no gradient from before, which could be written in place.
    """
    if scenario.variant != ASSIGNED.variant:
        return None
    draw = generator(scenario, "assigned")
    params = range(len(scenario.params))
    forms: list[Assigned | None] = [None] * (len(scenario.steps) - 3 * len(CHANGED_IN))
    for way in CHANGED_IN:
        forms.append(Assigned(tuple(params), way, True, draw.random() < 0.5))
        for is_first in (True, False):
            some = tuple(sorted(draw.sample(params, draw.randint(1, len(params) - 1))))
            forms.append(Assigned(some, way, is_first, draw.random() < 0.5))
    draw.shuffle(forms)
    new = [place for place, form in enumerate(forms) if not form or form.way == NEW_TENSOR]
    first = draw.choice(new)
    forms[0], forms[first] = forms[first], forms[0]
    return forms[step]


def setting_in_half(scenario: Scenario) -> dict[str, Any]:
    """Return the options of steps in half precision: each is judged from the one before it."""
    draw = generator(scenario, "options")
    return {"lr": draw.uniform(0.3, 1.0), "momentum": 0.0}


def is_in_half(scenario: Scenario) -> bool:
    """Whether a scenario whose steps are judged from records has parameters of half precision."""
    return scenario.variant in (ACCUMULATED_BFLOAT16.variant, WIDE.variant, HALF.variant)


def _let_rest(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Let the gradients of one parameter be zeros on all ranks in two steps; both are drawn.

    By the third step every parameter has had a gradient on every rank, and so a momentum. In five
    steps in a row each parameter has three with a gradient on every rank (``gradients.uses``).
    """
    kinds = list(scenario.steps)
    for step in numbers.sample(range(2, len(kinds)), 2):
        used = [index for index in range(len(scenario.params)) if (index + step) % 5 not in (1, 3)]
        kinds[step] = f"{RESTING}/{numbers.choice(used)}"
    return replace(scenario, steps=tuple(kinds))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    **optimizer_wide_gradients.DRAWS,
    UNUSED.name: _let_rest,
}
