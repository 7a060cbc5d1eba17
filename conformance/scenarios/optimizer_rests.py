"""Scenarios for optimizer wrappers: parameters without a gradient for many steps in a row, or with
one of zeros.

Layers are frozen in turns, an expert of a mixture is seldom used, a schedule trains a layer late.
torch.optim keeps the state of a parameter that has no gradient, however long that lasts, and Adam's
count of steps is each parameter's own. Under DDP, or after ``zero_grad(set_to_none=False)``, such a
parameter has a gradient of zeros: it is stepped, and its moments decay. So do those of the rows of
an embedding whose tokens do not occur. Options of groups stay as they are for many steps, and are
written then: a step that was captured, as in a CUDA graph, holds the old ones. A frozen backbone is
a group without any gradient, in front of others that have some. All numbers are drawn from the
session's seed.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.optimizer import PLAIN, Setting
from conformance.scenarios.seeds import generator

RESTS = replace(
    PLAIN,
    name="optimizer_rests",
    summary="of twelve parameters seven have no gradient in many steps: for up to 300 steps in a "
    "row, in turns, in all steps but every so many, or until their first one; three are frozen "
    "then; four more have gradients of zeros, in whole or in some rows; a group is added "
    "meanwhile; options of groups are written after many steps without a change; at the end one "
    "group rests as a whole, twice, and in one step no parameter has a gradient; if ranks have "
    "gradients of their own, two rests end on one rank before the other",
    params=(
        *(Param((5, 3)), Param((7,)), Param(()), Param((2, 3))),
        *(Param((4,)), Param((3, 2)), Param((9,)), Param((2, 2))),
        *(Param((6, 2)), Param((5,)), Param((4, 3)), Param((3,))),
    ),
    steps=("normal",) * 350,
    world_sizes=(2,),
    variant="rests",
)

RESTS_OF_ADAM = replace(
    RESTS,
    name="optimizer_rests_of_adam",
    summary="the scenario `optimizer_rests` with Adam or AdamW",
    variant="rests_of_adam",
)

ALL = (RESTS, RESTS_OF_ADAM)

# The first steps of rests that last for most of the run, and their numbers of steps.
_FIRST_STEPS = (2, 20)
_LONG = (260, 300)
# Options are written after so many steps without a change of the groups: once in the shorter part
# of the run, before or after the added group, and once in the longer part, which has more than 170.
_UNCHANGED = (12, 60)
_LONG_UNCHANGED = 150
# So many steps are left after the last write.
_STEPS_AFTER = 5
# The number of steps in which a rest is over on one rank alone.
_ALONE = (3, 15)
# The number of steps of each rest of a whole group.
_COMMON = (2, 6)
# Gradients come again after so many steps, but for their zeros: they take long to make.
_INPUTS = (25, 40)
_VARIANTS = (RESTS.variant, RESTS_OF_ADAM.variant)


@dataclass(frozen=True)
class Rest:
    """The steps in which a parameter has no gradient on any rank, or one of zeros on all ranks.

    Attributes:
        steps: these steps.
        is_frozen: whether the parameter requires no gradient then.
        zeros: the part of the gradient that is zeros then, from 0 to 1, in whole rows; None if
            there is no gradient.
        alone: the steps after the rest in which one rank alone has a gradient, if ranks have their
            own: its rest ends first.
        first_place: the place of that rank in its group, modulo the group's size.
    """

    steps: frozenset[int]
    is_frozen: bool = False
    zeros: tuple[float, float] | None = None
    alone: range = range(0)
    first_place: int = 0


@dataclass(frozen=True)
class CommonRest:
    """The steps in which all parameters of a group have no gradient on any rank.

    Attributes:
        place: of the group, which is not the last one.
        indices: its parameters.
        frozen: the steps in which they are frozen.
        without: the steps in which they are not.
        nothing: one more step, in which no parameter of any group has a gradient.
    """

    place: int
    indices: tuple[int, ...]
    frozen: range
    without: range
    nothing: int


def rests(scenario: Scenario) -> bool:
    """Whether parameters of a scenario rest."""
    return scenario.variant in _VARIANTS


def rests_at(scenario: Scenario, step: int, index: int, *, frozen: bool) -> bool:
    """Whether a parameter has no gradient at a step, and is frozen then or is not."""
    common = common_rest(scenario)
    if step == common.nothing:
        return not frozen
    if index in common.indices and (step in common.frozen or step in common.without):
        return (step in common.frozen) is frozen
    rest = _plan(scenario.session_seed, scenario.name)[index]
    return step in rest.steps and rest.zeros is None and rest.is_frozen is frozen


def rests_in_place(scenario: Scenario, step: int, index: int, place: int, size: int) -> bool:
    """Whether a parameter still rests on a rank, although its rest is over on another one.

    Args:
        place: of the rank in its group.
        size: of the group.
    """
    if not rests(scenario):
        return False
    rest = _plan(scenario.session_seed, scenario.name)[index]
    return step in rest.alone and place != rest.first_place % size


def zeros_at(scenario: Scenario, step: int, index: int) -> range:
    """Return the elements of a gradient that are zeros at a step, in C order."""
    if not rests(scenario):
        return range(0)
    rest = _plan(scenario.session_seed, scenario.name)[index]
    if step not in rest.steps or rest.zeros is None:
        return range(0)
    rows, *others = scenario.params[index].shape or (1,)
    width = math.prod(others)
    begin, end = rest.zeros
    first = min(int(begin * rows), rows - 1)
    return range(first * width, max(first + 1, int(end * rows)) * width)


def rests_of(scenario: Scenario) -> tuple[Rest, ...]:
    """Return the rests of all parameters."""
    return _plan(scenario.session_seed, scenario.name)


def common_rest(scenario: Scenario) -> CommonRest:
    """Return the rest of a whole group."""
    return _common_rest(scenario.session_seed, scenario.name)


def step_of_gradients(scenario: Scenario, step: int) -> int:
    """Return the first step that has the gradients of a step, but for their zeros."""
    return step % _number_of_inputs(scenario.session_seed, scenario.name)


def setting_of_rests(scenario: Scenario, wrapped: str) -> Setting:
    """Return the options of a scenario in which parameters rest.

    Args:
        wrapped: the name of the optimizer's class.
    """
    return _setting(scenario.session_seed, scenario.name, wrapped)


def _scenario(seed: int, name: str) -> Scenario:
    (scenario,) = (scenario for scenario in ALL if scenario.name == name)
    return replace(scenario, session_seed=seed)


@lru_cache
def _number_of_inputs(seed: int, name: str) -> int:
    return generator(_scenario(seed, name), "inputs").randint(*_INPUTS)


@lru_cache
def _plan(seed: int, name: str) -> tuple[Rest, ...]:
    scenario = _scenario(seed, name)
    draw = generator(scenario, "rests")
    every = draw.randint(9, 60)
    count = len(scenario.steps)
    seldom = set(range(count)) - set(range(draw.randrange(every), count, every))
    part = (draw.uniform(0.0, 0.4), draw.uniform(0.5, 0.9))
    late = frozenset(range(draw.randint(100, 250)))
    rests = [
        Rest(frozenset()),
        Rest(frozenset(seldom)),
        _ends_alone(scenario, Rest(late), place=0),
        Rest(frozenset(range(draw.randint(20, 99))), is_frozen=True),
    ]
    for is_frozen, zeros in ((False, None), (True, None), (False, (0.0, 1.0)), (False, part)):
        begin = draw.randint(*_FIRST_STEPS)
        long = range(begin, begin + draw.randint(*_LONG))
        rests.append(Rest(frozenset(long), is_frozen, zeros))
        turns = Rest(frozenset(_turns(draw)), is_frozen, zeros)
        has_end = zeros is None and not is_frozen
        rests.append(_ends_alone(scenario, turns, place=1) if has_end else turns)
    draw.shuffle(rests)
    return tuple(rests)


def _ends_alone(scenario: Scenario, rest: Rest, place: int) -> Rest:
    """Return a rest that is over on one rank before it is on the others.

    Args:
        place: the number of the rest. The next one is over first on the next rank.
    """
    end = max(rest.steps) + 1
    alone = range(end, end + generator(scenario, f"alone {place}").randint(*_ALONE))
    first_place = place + generator(scenario, "first place").randrange(2)
    return replace(rest, alone=alone, first_place=first_place)


def _turns(draw: random.Random) -> Iterable[int]:
    """Yield the steps of three turns: a short one, a long one, and one between them."""
    lengths = [draw.randint(1, 8), draw.randint(9, 60), draw.randint(61, 130)]
    draw.shuffle(lengths)
    begin = draw.randint(*_FIRST_STEPS)
    for length in lengths:
        yield from range(begin, begin + length)
        begin += length + draw.randint(1, 20)


@lru_cache
def _common_rest(seed: int, name: str) -> CommonRest:
    draw = generator(_scenario(seed, name), "common rest")
    # All other rests but the seldom use are over by then, and options are written before the end.
    begin = draw.randint(_FIRST_STEPS[1] + _LONG[1], _FIRST_STEPS[1] + _LONG[1] + 5)
    rests = []
    for _ in range(2):
        rests.append(range(begin, begin + draw.randint(*_COMMON)))
        begin = rests[-1].stop + draw.randint(1, 3)
    frozen, without = draw.sample(rests, 2)
    place = draw.randrange(2)
    last = len(RESTS.steps) - _STEPS_AFTER - 1
    nothing = draw.randint(begin, last)
    return CommonRest(place, _members(seed, name)[place], frozen, without, nothing)


@lru_cache
def _members(seed: int, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the parameters of the groups.

    The parameter that never rests is in a group that is added while others rest: one of these is
    frozen and has a state, and so has another one without a gradient.
    """
    draw = generator(_scenario(seed, name), "groups")
    late = _plan(seed, name).index(Rest(frozenset()))
    others = [index for index in range(len(RESTS.params)) if index != late]
    draw.shuffle(others)
    half = draw.randint(4, len(others) - 4)
    return tuple(sorted(others[:half])), tuple(sorted(others[half:])), (late,)


@lru_cache
def _setting(seed: int, name: str, wrapped: str) -> Setting:
    draw = generator(_scenario(seed, name), "options")
    options = _options(draw, wrapped)
    added = draw.randint(_FIRST_STEPS[1] + 1, _FIRST_STEPS[0] + _LONG[0] - 1)
    return Setting(
        warmup=draw.randint(5, 30),
        period=draw.randint(15, 40),
        options=options,
        groups=tuple((indices, options) for indices in _members(seed, name)),
        added=(added,),
        changes={
            step: _written(draw, wrapped, 2 if step < added else 3)
            for step in _steps_of_writes(draw, added)
        },
    )


def _options(draw: random.Random, wrapped: str) -> dict[str, Any]:
    """Return the options of a group.

    A weight decay adds errors of parameters to those of the momentum: their bounds grow by a factor
    of 1 + lr weight_decay / (1 - momentum) in a step, which is 1.02 at most.
    """
    momentum = draw.uniform(0.5, 0.9)
    decay = {"weight_decay": draw.uniform(0.002, 0.01)}
    if wrapped == "SGD":
        return {"lr": draw.uniform(0.05, 0.2), "momentum": momentum, **decay}
    # Adam adds the decay to the gradient: of zeros it would take steps of the full rate.
    decay = {"weight_decay": draw.uniform(0.01, 0.1)} if wrapped == "AdamW" else {}
    betas = (momentum, draw.uniform(0.9, 0.999))
    return {"lr": draw.uniform(0.002, 0.02), "betas": betas, **decay}


def _steps_of_writes(draw: random.Random, added: int) -> tuple[int, int]:
    """Return a step after 12 to 60 steps without a change of the groups, and one after 150 or more.

    Args:
        added: the step before which a group is added, which is a change.
    """
    parts = sorted((range(added), range(added, len(RESTS.steps))), key=len)
    shorter, longer = (part[:-_STEPS_AFTER] for part in parts)
    least, most = _UNCHANGED
    return (
        shorter[draw.randint(least, min(most, len(shorter) - 1))],
        longer[draw.randint(_LONG_UNCHANGED, len(longer) - 1)],
    )


def _written(draw: random.Random, wrapped: str, groups: int) -> dict[int, dict[str, Any]]:
    """Return the options that are written to groups: some to one, the others to another one, and
    all to a third one, if there is one.
    """
    places = draw.sample(range(groups), groups)
    written = [_options(draw, wrapped) for _ in places]
    names = list(written[0])
    some = set(draw.sample(names, draw.randint(1, len(names) - 1)))
    for name in names:
        del written[1 if name in some else 0][name]
    return dict(zip(places, written, strict=True))
