"""Scenarios for optimizer wrappers: states and options of other forms than numbers and tensors.

Their numbers are drawn from the session's seed.
"""

import math
import random
import struct
from dataclasses import replace
from typing import Any

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.optimizer import (
    LAST_OVERFLOW,
    PLAIN,
    RELOADED,
    SCHEDULED,
    Scaling,
    Setting,
)
from conformance.scenarios.seeds import generator

# In float64 small changes of a learning rate show.
_WIDE = tuple(replace(param, dtype="float64") for param in SCHEDULED.params)

SMALL_CHANGES = replace(
    SCHEDULED,
    name="optimizer_small_changes",
    summary="learning rates that differ little from those of the step before, and tiny ones; "
    "parameters of float64",
    params=_WIDE,
    steps=("normal",) * 8,
    variant="small_changes",
)

TENSOR_RATES = replace(
    SCHEDULED,
    name="optimizer_tensor_rates",
    summary="learning rates are tensors that are filled in place before steps, some with nearly "
    "the same rate; a group is added; parameters of float64",
    params=_WIDE,
    steps=("normal",) * 6,
    variant="tensor_rates",
)

RESTORED_RATES = replace(
    TENSOR_RATES,
    name="optimizer_restored_rates",
    summary="the scenario `optimizer_tensor_rates` with Adam or AdamW; before a drawn step "
    "everything is restored to an earlier step; all other options of each group have been "
    "rewritten since; one more group is added after that",
    params=(*_WIDE, Param((3,), "float64")),
    steps=("normal",) * 10,
    variant="restored_rates",
)

RESTORED_OPTIONS = replace(
    RESTORED_RATES,
    name="optimizer_restored_options",
    summary="every option of each group of SGD is rewritten after a step that is restored later; "
    "one more group is added after that; parameters of float64",
    variant="restored_options",
)

SCALED = replace(
    PLAIN,
    name="optimizer_scaled",
    summary="a GradScaler is around the optimizer: in drawn steps the gradients of all ranks "
    "overflow, in one those of the second group alone, in one those of an added group alone, and "
    "in one those of a rank alone if the optimizer takes the scale itself; in others one parameter "
    "has no gradient",
    steps=("crafted",) * 12,
    world_sizes=(2,),
    variant="scaled",
)

USERS = replace(
    RELOADED,
    name="optimizer_users",
    summary="an optimizer of the user's own, whose state is an integer, and tensors in a dict and "
    "a list, and which counts in its groups; before a drawn step everything is restored to an "
    "earlier step",
    steps=("crafted",) * 9,
    variant="users",
)

ALL = (SMALL_CHANGES, TENSOR_RATES, RESTORED_RATES, RESTORED_OPTIONS, SCALED, USERS)

# The first parameter group, the second, and the group that is added.
_GROUPS = ((0, 3), (1, 2), (4,))
# The parameters of one more group, which is added after everything was restored.
_ADDED_LATE = (5,)
# The last step before which it is added; there is another one, with a schedule.
_LAST_ADDED = len(RESTORED_RATES.steps) - 2


# Changes of a learning rate, relative to it, lie between these powers of ten. The least is some
# times as large as the distance of two numbers in float32.
_CHANGES = (-6.5, -3.0)


def small_changes(draw: random.Random) -> Setting:
    """Return the plan of learning rates that change by little.

    Five changes are small relative to the rate: one in each fifth of the range of exponents. Then
    come two tiny rates, as at the end of a schedule, whose difference is tiny, too.
    """
    least, largest = _CHANGES
    fifth = (largest - least) / 5
    exponents = [least + fifth * (place + draw.random()) for place in range(5)]
    draw.shuffle(exponents)
    rates = [_representable(draw.uniform(0.01, 0.2))]
    for exponent in exponents:
        rates.append(_changed(rates[-1], exponent, draw))
    tiny = 10 ** draw.uniform(-7, -5)
    rates += [_representable(tiny), _representable(tiny * draw.uniform(1.5, 3))]
    options = {"lr": rates[0], "momentum": 0.0}
    return Setting(warmup=draw.randint(1, 3), period=3, options=options, rates=tuple(rates))


def rate_written_late(scenario: Scenario) -> tuple[float | None, ...]:
    """Return the rates of a long run: one is written in its second half, and stays.

    It is a quarter of the construction's rate, which is 2**-3, or four times as much.
    """
    draw = generator(scenario, "late rate")
    count = len(scenario.steps)
    rates: list[float | None] = [None] * count
    rates[draw.randint(count // 2, count - 10)] = 2.0 ** draw.choice((-5, -1))
    return tuple(rates)


def _changed(rate: float, exponent: float, draw: random.Random) -> float:
    """Return a rate that is larger or smaller by a power of ten of itself."""
    return _representable(rate * (1 + draw.choice((-1, 1)) * math.pow(10, exponent)))


def _representable(rate: float) -> float:
    """Return the number of float32 next to a rate: some optimizers keep rates in this dtype."""
    (nearest,) = struct.unpack("f", struct.pack("f", rate))
    return float(nearest)


def tensor_rates(draw: random.Random, wrapped: str, restores: bool) -> Setting:
    """Return the plan of learning rates in tensors; every other change is small.

    Args:
        wrapped: the name of the optimizer's class.
        restores: whether everything is restored. No rate is written in the step after that: the
            restored one counts. One more group is added then or later.
    """

    def options() -> dict[str, Any]:
        rate = _representable(draw.uniform(0.01, 0.1))
        momentum = draw.uniform(0.5, 0.95)
        if wrapped == "SGD":
            return {"lr": rate, "momentum": momentum}
        decay = draw.uniform(0.05, 0.5)
        return {"lr": rate, "betas": (momentum, draw.uniform(0.8, 0.999)), "weight_decay": decay}

    groups = tuple((indices, options()) for indices in _GROUPS)
    added = draw.randint(1, 2)
    saved = draw.randint(added + 1, 4)
    restored = draw.randint(saved + 2, 7)
    added_late: tuple[int, ...] = ()
    if restores:
        groups = (*groups, (_ADDED_LATE, options()))
        added_late = (draw.randint(restored, _LAST_ADDED),)
    plan = Setting(groups=groups, added=(added, *added_late))
    latest = [options["lr"] for _, options in groups]
    changes: dict[int, dict[int, dict[str, Any]]] = {}
    for step in range(1, len(RESTORED_RATES.steps)):
        if restores and step == restored:
            continue
        for place in range(plan.groups_at(step)):
            if (step + place) % 2:
                latest[place] = _changed(latest[place], draw.uniform(*_CHANGES), draw)
            else:
                latest[place] = _representable(draw.uniform(0.01, 0.1))
            changes.setdefault(step, {})[place] = {"lr": latest[place]}
    if restores:
        for place, flag in enumerate(_alternating(draw)):
            before, after = (_options_of_adam(draw, is_high) for is_high in (flag, not flag))
            _rewrite(changes, draw, place, (before, after), (added, saved, restored))
    return replace(
        plan,
        warmup=draw.randint(1, 3),
        options={"lr": 2.0**-3},
        changes=changes,
        back=(restored, saved) if restores else (-1, -1),
        has_tensor_rates=True,
    )


def restored_options(draw: random.Random) -> Setting:
    """Return the plan of options of SGD that are restored.

    None is written after that, but those of a group that is added then or later.
    """
    flags = _alternating(draw)
    groups = tuple(
        (indices, _options_of_sgd(draw, not flag))
        for indices, flag in zip(_GROUPS, flags, strict=True)
    )
    added = draw.randint(1, 2)
    saved = draw.randint(added + 1, 4)
    restored = draw.randint(saved + 2, 7)
    changes: dict[int, dict[int, dict[str, Any]]] = {}
    for place, flag in enumerate(flags):
        before, after = (_options_of_sgd(draw, is_high) for is_high in (flag, not flag))
        _rewrite(changes, draw, place, (before, after), (added, saved, restored))
    is_high = draw.random() < 0.5
    groups = (*groups, (_ADDED_LATE, _options_of_sgd(draw, is_high)))
    added_late = draw.randint(restored, _LAST_ADDED)
    written = _options_of_sgd(draw, not is_high)
    changes.setdefault(draw.randint(added_late + 1, _LAST_ADDED + 1), {})[len(_GROUPS)] = written
    return Setting(
        warmup=draw.randint(1, 3),
        options={"lr": 2.0**-3},
        groups=groups,
        added=(added, added_late),
        changes=changes,
        back=(restored, saved),
    )


def _alternating(draw: random.Random) -> list[bool]:
    """Return whether the options of each group are high when they are saved; one is like no
    neighbour, so that some rise until the load and some fall.
    """
    first = draw.random() < 0.5
    return [first ^ bool(place % 2) for place in range(len(_GROUPS))]


def _options_of_sgd(draw: random.Random, is_high: bool) -> dict[str, Any]:
    """Return options of the upper halves of their ranges, with nesterov and maximize, or others."""
    return {
        "lr": _in_half(draw, is_high, 0.01, 0.1),
        "momentum": _in_half(draw, is_high, 0.5, 0.95),
        # torch takes none with nesterov.
        "dampening": 0.0 if is_high else draw.uniform(0.1, 0.5),
        "weight_decay": _in_half(draw, is_high, 0.05, 0.5),
        "nesterov": is_high,
        "maximize": is_high,
    }


def _options_of_adam(draw: random.Random, is_high: bool) -> dict[str, Any]:
    """Return options of the upper halves of their ranges, with maximize, or others."""
    return {
        "betas": (_in_half(draw, is_high, 0.5, 0.95), _in_half(draw, is_high, 0.8, 0.999)),
        "eps": 10 ** _in_half(draw, is_high, -6, -2),
        "weight_decay": _in_half(draw, is_high, 0.05, 0.5),
        "maximize": is_high,
    }


def _in_half(draw: random.Random, is_upper: bool, low: float, high: float) -> float:
    """Return a number from one half of a range, at some distance from the other half."""
    share = draw.uniform(0.6, 1.0) if is_upper else draw.uniform(0.0, 0.4)
    return low + share * (high - low)


def _rewrite(
    changes: dict[int, dict[int, dict[str, Any]]],
    draw: random.Random,
    place: int,
    options: tuple[dict[str, Any], dict[str, Any]],
    steps: tuple[int, int, int],
) -> None:
    """Write options to a group before a step up to the saved one, and others after that.

    So each saved option is neither the one of the construction nor the one at the load.

    Args:
        changes: the options that are written, by step and by group; these are added.
        draw: the generator.
        place: of the group.
        options: those that are saved, and those at the load.
        steps: the step in which the last group is added, the saved one and the restored one.
    """
    added, saved, restored = steps
    drawn = draw.randint(added, saved), draw.randint(saved + 1, restored - 1)
    for step, written in zip(drawn, options, strict=True):
        changes.setdefault(step, {}).setdefault(place, {}).update(written)


def scaled(draw: random.Random) -> Setting:
    """Return the plan of a GradScaler: steps that overflow, scales, and steps that are clipped."""
    first, second, alone, third, last = draw.sample(range(1, LAST_OVERFLOW + 1), 5)
    # The gradients of the added group overflow after it was added.
    third, last = sorted((third, last))
    rates = [2.0**exponent for exponent in draw.sample((-4, -3, -2), len(_GROUPS))]
    # Each kind of step is unscaled once before the step, and once by the GradScaler.
    unscaled = {step for step in range(12) if draw.random() < 0.5}
    unscaled = (unscaled | {first, 9}) - {second, 10}
    return Setting(
        warmup=draw.randint(2, 4),
        # Four steps are left out: with a period of two, or four, a count of them would not show.
        period=3,
        groups=tuple((indices, {"lr": rate}) for indices, rate in zip(_GROUPS, rates, strict=True)),
        added=(draw.randint(1, last - 1),),
        scaling=Scaling(
            first_scale=2.0 ** draw.randint(8, 14),
            interval=draw.randint(2, 3),
            last_scale=2.0 ** -draw.randint(5, 10),
            everywhere=(first, second, third, last),
            alone=alone,
            alone_place=draw.randrange(8),
            unscaled=tuple(sorted(unscaled)),
            clip=2.0 ** draw.randint(1, 3),
            apart=draw.randint(1, 3),
            within={third: _GROUPS[1], last: _GROUPS[2]},
            lacking=_lacking(draw, {first, second, alone, third, last}),
        ),
    )


def _lacking(draw: random.Random, overflowing: set[int]) -> dict[int, int]:
    """Return the parameter without a gradient, by step; in steps that overflow each has one.

    One of these steps is unscaled before the step, and one by the GradScaler.
    """
    steps = {9, 10, *(step for step in range(12) if draw.random() < 0.25)} - overflowing
    return {step: draw.randrange(len(PLAIN.params)) for step in sorted(steps)}


def users(draw: random.Random) -> Setting:
    """Return the plan of an optimizer of the user's own; powers of two keep it exact."""

    def options() -> dict[str, Any]:
        return {"lr": 2.0 ** -draw.randint(3, 4), "share": 2.0 ** -draw.randint(0, 2)}

    saved = draw.randint(1, 3)
    restored = draw.randint(saved + 2, 6)
    # The restored options count afterwards; 15.14 judges what is written later.
    changes = {step: {draw.randrange(2): options()} for step in range(1, restored)}
    return Setting(
        warmup=draw.randint(1, 3),
        period=3,
        options=options(),
        groups=(((0, 3, 4), options()), ((1, 2), options())),
        changes=changes,
        back=(restored, saved),
    )
