"""The scenarios for optimizer wrappers as training uses them: sizes, options, values and models.

Their numbers are drawn from the session's seed (``plan_of``, and ``subjects/kinds/optimizer.py``).
``optimizer_gradients.py`` decides which rank has a gradient. The ranks that run a scenario and the
rules that judge it both call these functions.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from conformance.scenarios.averager_training import LONG_STEPS, option
from conformance.scenarios.interrupts import ERROR, drawn_interrupts
from conformance.scenarios.model import Observation, Param, Scenario
from conformance.scenarios.optimizer import _PARAMS, DTYPES, GROUPS, PLAIN, SAVED, Setting, setting
from conformance.scenarios.optimizer_backwards import ACCUMULATED_BFLOAT16, setting_in_half
from conformance.scenarios.optimizer_clipping import CLIPPED, setting_of_clipped
from conformance.scenarios.optimizer_closures import CLOSURE_IN_PARTS
from conformance.scenarios.optimizer_groups import (
    OF_ADAM,
    OF_SGD,
    few_groups,
    groups_together,
    leaving_out,
    many_groups,
    with_empty_group,
    with_zeros,
)
from conformance.scenarios.optimizer_in_half import HALF, is_closed_in_half
from conformance.scenarios.optimizer_in_half import setting_in_half as with_groups_in_half
from conformance.scenarios.optimizer_loops import (
    AUTOCAST,
    RENEWED,
    RESET,
    WRITTEN,
    renewed,
    reset,
    written,
)
from conformance.scenarios.optimizer_repeats import REPEATED_BFLOAT16, repeated
from conformance.scenarios.optimizer_rests import RESTS, RESTS_OF_ADAM, setting_of_rests
from conformance.scenarios.optimizer_states import (
    RESTORED_OPTIONS,
    RESTORED_RATES,
    SCALED,
    SMALL_CHANGES,
    TENSOR_RATES,
    USERS,
    rate_written_late,
    restored_options,
    scaled,
    small_changes,
    tensor_rates,
    users,
)
from conformance.scenarios.optimizer_wide_gradients import WIDE, setting_of_wide
from conformance.scenarios.own_entries import with_entries
from conformance.scenarios.seeds import generator, shared_generator

OWN = replace(
    PLAIN,
    name="optimizer_own",
    summary="every rank has gradients of its own, and nothing of the kit averages them; those of a "
    "backward arrive in a drawn order, and in some steps in another one on each rank",
    params=(*_PARAMS, Param((7,)), Param((5, 3))),
    steps=("crafted",) * 6,
    world_sizes=(2, 3),
    variant="own",
)

LARGE = replace(
    PLAIN,
    name="optimizer_large",
    summary="some hundred parameters, one of them of a million elements and more; drawn sizes",
    steps=("crafted",) * 3,
    world_sizes=(2,),
    variant="large",
)

SPECIAL = replace(
    PLAIN,
    name="optimizer_special",
    summary="NaN and infinities in the gradients of one rank, or of several; gradients of float16 "
    "whose sum overflows, if the subject averages gradients",
    steps=("limit", "nan", "inf", "crafted"),
    world_sizes=(2, 3),
    variant="special",
)

RANDOM_DTYPES = replace(
    DTYPES,
    name="optimizer_random_dtypes",
    summary="random gradients of four dtypes in one model; momentum and weight decay",
    steps=("normal",) * 6,
    variant="random_dtypes",
)

OPTIONS = replace(
    PLAIN,
    name="optimizer_options",
    summary="every option of SGD, with other values in each group; rate, momentum, dampening and "
    "weight decay are rewritten before some steps, and some steps have a closure",
    steps=("normal",) * 8,
    world_sizes=(3,),
    variant="options",
)

ADAM_OPTIONS = replace(
    OPTIONS,
    name="optimizer_adam_options",
    summary="the scenario `optimizer_options` with every option of Adam",
    world_sizes=(2,),
    variant="adam_options",
)

EMPTY = replace(
    PLAIN,
    name="optimizer_empty",
    summary="in some steps one rank has no gradient at all; one parameter is frozen, and one "
    "unfrozen, at a drawn step; others are frozen for some steps, before the first of these, after "
    "its backward",
    steps=("crafted",) * 12,
    world_sizes=(2, 3),
    variant="empty",
)
FROZEN = 0
UNFROZEN = 1

TWO = replace(
    PLAIN,
    name="optimizer_two",
    summary="two optimizers of two models, with options and groups of their own, take turns in a "
    "drawn order; before some pairs of their steps both models get their gradients, by one "
    "backward or by two",
    steps=("crafted",) * 16,
    world_sizes=(2,),
    variant="two",
)

TWO_GROUPS = replace(
    TWO,
    name="optimizer_two_groups",
    summary="the scenario `optimizer_two` on two groups of different sizes: WORLD, and a part of "
    "it; their order and the parts are drawn",
    world_sizes=(),
    size=4,
    twin_groups=((0, 2), (1, 3)),
)

SAVED_GROUPS = replace(
    SAVED,
    name="optimizer_saved_groups",
    summary="on subgroups, Adam with interleaved parameter groups and rewritten rates is saved "
    "within the warm-up, before and after a group was added; one group has amsgrad, and one is "
    "added later; one or two parameters are trained after the save alone",
    params=(*_PARAMS, Param((5, 3)), Param((7,)), Param((3,))),
    steps=("normal",) * 14,
    world_sizes=(),
    groups=((1, 3), (0, 2)),
    variant="saved_groups",
)

RESUMED_GROUPS = replace(
    SAVED_GROUPS,
    name="optimizer_resumed_groups",
    summary="new processes load that state twice, save it and load that, and continue; they add "
    "groups before, and their groups have the parameters of equal shapes in another order; one "
    "more group is added later",
    prerequisite="optimizer_saved_groups",
    resume=replace(SAVED_GROUPS.resume, resumes=True),
)

LONG = replace(
    PLAIN,
    name="optimizer_long",
    summary=f"a small model in {LONG_STEPS[0]} to {LONG_STEPS[1]} steps; the learning rate is "
    "written once, in the second half; every other rank has another hash seed",
    params=(Param((3,)), Param((2, 2)), Param((5,)), Param((2, 3))),
    world_sizes=(2,),
    hash_seeds_differ=True,
    variant="long",
    observe=Observation(growth=True),
)

MANY_GROUPS = replace(
    PLAIN,
    name="optimizer_many_groups",
    summary="12 to 40 parameter groups with options of their own, and an empty one in front of "
    "one of them; their number is drawn; all parameters are views of one flat buffer, in a drawn "
    "order and with drawn gaps",
    steps=("normal",) * 5,
    world_sizes=(2,),
    variant="many_groups",
)

ADAMW = replace(
    PLAIN,
    name="optimizer_adamw",
    summary="AdamW with drawn options, on random gradients; one of its two groups has amsgrad",
    steps=("normal",) * 8,
    world_sizes=(2,),
    variant="adamw",
)

ADAGRAD = replace(
    ADAMW,
    name="optimizer_adagrad",
    summary="Adagrad with drawn options, on random gradients",
    variant="adagrad",
)

ALL = (
    *(OWN, LARGE, SPECIAL, RANDOM_DTYPES, OPTIONS, ADAM_OPTIONS, EMPTY, TWO, TWO_GROUPS),
    *(SAVED_GROUPS, RESUMED_GROUPS, LONG, MANY_GROUPS, ADAMW, ADAGRAD),
)

# The first parameter group, the second, and the group that is added, if one is.
_GROUPS = ((0, 3), (1, 2), (4,))
ADAM = ("adam", "adam_options", "saved_groups")
_OTHERS = {"adamw": "AdamW", "adagrad": "Adagrad"}
USER_OPTIMIZER = "UserOptimizer"
_RANDOM = (
    *("random", "random_dtypes", "options", "many_groups", "together", *ADAM, *_OTHERS),
    *(TENSOR_RATES.variant, RESTORED_RATES.variant, SMALL_CHANGES.variant),
    RESTORED_OPTIONS.variant,
    *(WRITTEN.variant, RENEWED.variant, RESET.variant, AUTOCAST.variant),
    *(RESTS.variant, RESTS_OF_ADAM.variant, REPEATED_BFLOAT16.variant),
    *(ACCUMULATED_BFLOAT16.variant, WIDE.variant, CLIPPED.variant, HALF.variant),
)


def wrapped_class(scenario: Scenario) -> str:
    """Return the name of the class that the subject wraps, in torch.optim or the user's own."""
    if scenario.variant == USERS.variant:
        return USER_OPTIMIZER
    if scenario.variant in (RESTORED_RATES.variant, RESTS_OF_ADAM.variant):
        return generator(scenario, "class").choice(("Adam", "AdamW"))
    return _OTHERS.get(scenario.variant, "Adam" if scenario.variant in ADAM else "SGD")


def averages_gradients(scenario: Scenario) -> bool:
    """Whether the subject claims to average gradients."""
    return bool(option(scenario, "averages"))


def is_exact(scenario: Scenario) -> bool:
    """Whether every right computation gives the same bits."""
    return scenario.variant not in (*_RANDOM, "special")


def is_closed(scenario: Scenario, step: int) -> bool:
    """Whether a step is given a closure."""
    if scenario.variant == "saved_closed":
        return scenario.resume.also_taken_at <= step < scenario.resume.saves_at
    if is_closed_in_half(scenario, step):
        return True
    return scenario.variant in ("closure", CLOSURE_IN_PARTS.variant) or (
        scenario.variant in ("options", "adam_options", AUTOCAST.variant) and step % 3 == 1
    )


def raised_before(scenario: Scenario, step: int) -> str:
    """Return the name of the exception that a closure raises before a step; '' if none does."""
    if scenario.variant != "closure":
        return ""
    numbers = random.Random(f"{scenario.session_seed}/{scenario.name}/raises")
    names = (ERROR, *drawn_interrupts(scenario))
    steps = numbers.sample(range(len(scenario.steps)), len(names))
    return dict(zip(steps, names, strict=True)).get(step, "")


def plan_of(scenario: Scenario) -> Setting:
    """Return the arguments of a scenario's optimizer and averager, drawn if they are."""
    return with_entries(_plan_of(scenario), scenario)


@functools.lru_cache(maxsize=64)
def kept_plan(scenario: Scenario) -> Setting:
    """Return the plan of :func:`plan_of`, drawn once, for callers that only read it."""
    return plan_of(scenario)


def _plan_of(scenario: Scenario) -> Setting:
    match scenario.variant:
        case GROUPS.variant:
            return few_groups(generator(scenario))
        case "own":
            return Setting(options={"lr": 2.0**-3, "momentum": 0.0})
        case "long":
            # Without momentum the sums of hundreds of gradients are exact.
            return Setting(
                warmup=2,
                period=3,
                options={"lr": 2.0**-3, "momentum": 0.0},
                rates=rate_written_late(scenario) if scenario.name == LONG.name else (),
            )
        case "special":
            return Setting(options={"lr": 1.0, "momentum": 0.0})
        case "random_dtypes":
            draw = generator(scenario)
            return Setting(
                options={
                    "lr": draw.uniform(0.05, 0.2),
                    "momentum": draw.uniform(0.5, 0.95),
                    "weight_decay": draw.uniform(0.01, 0.1),
                }
            )
        case "options":
            return _sgd_options(generator(scenario))
        case "adam_options":
            return _adam_options(generator(scenario))
        case "many_groups":
            draw = generator(scenario, "groups")
            return with_empty_group(many_groups(len(scenario.params), draw), draw)
        case "together":
            draw = shared_generator(scenario, "groups")
            return groups_together(len(scenario.params), draw)
        case "adamw":
            return _adamw(_one_group(_adamw_options, generator(scenario), len(scenario.params)))
        case "adagrad":
            return _one_group(_adagrad_options, generator(scenario), len(scenario.params))
        case TENSOR_RATES.variant | RESTORED_RATES.variant:
            restores = scenario.variant == RESTORED_RATES.variant
            return tensor_rates(generator(scenario), wrapped_class(scenario), restores)
        case RESTORED_OPTIONS.variant:
            return restored_options(generator(scenario))
        case SMALL_CHANGES.variant:
            return small_changes(generator(scenario))
        case SCALED.variant:
            return scaled(generator(scenario))
        case USERS.variant:
            return users(generator(scenario))
        case WRITTEN.variant:
            return written(scenario)
        case RESET.variant:
            return reset(scenario)
        case RESTS.variant | RESTS_OF_ADAM.variant:
            return setting_of_rests(scenario, wrapped_class(scenario))
        case REPEATED_BFLOAT16.variant:
            return repeated(scenario)
        case ACCUMULATED_BFLOAT16.variant:
            return Setting(options=setting_in_half(scenario))
        case WIDE.variant:
            return setting_of_wide(scenario)
        case CLIPPED.variant:
            return setting_of_clipped(scenario)
        case HALF.variant:
            return with_groups_in_half(scenario)
        case RENEWED.variant:
            return renewed(generator(scenario), len(scenario.params))
        case "saved_groups":
            # The two scenarios of a saved state have one plan.
            return _saved_groups(random.Random(f"{scenario.session_seed}/saved groups"))
    return setting(scenario)


def _sgd_options(draw: random.Random) -> Setting:
    def options(nesterov: bool) -> dict[str, Any]:
        return {
            "lr": draw.uniform(0.01, 0.2),
            "momentum": draw.uniform(0.5, 0.95),
            "dampening": 0.0 if nesterov else draw.uniform(0.1, 0.5),
            "weight_decay": draw.uniform(0.01, 0.2),
            "nesterov": nesterov,
            "maximize": draw.random() < 0.5,
        }

    of_all = options(draw.random() < 0.5)
    all_options = [(indices, options(bool(n % 2))) for n, indices in enumerate(_GROUPS)]
    groups = leaving_out(all_options, draw, OF_SGD, added=1)
    changes = {}
    for step in range(1, 8):
        # As OneCycleLR: the momentum falls while the rate rises.
        written: dict[str, Any] = {
            "lr": draw.uniform(0.01, 0.2),
            "momentum": draw.uniform(0.5, 0.95),
            "weight_decay": draw.uniform(0.01, 0.2),
        }
        number = draw.randrange(2)
        if not {**of_all, **groups[number][1]}["nesterov"]:
            written["dampening"] = draw.uniform(0.1, 0.5)
        changes[step] = {number: written}
    added = draw.randint(2, 5)
    # torch takes no nesterov without momentum.
    zeros = ({"momentum": 0.0, "nesterov": False}, {"weight_decay": 0.0})
    groups = with_zeros(groups, changes, draw, zeros)
    return Setting(options=of_all, groups=groups, added=(added,), changes=changes)


def _adam_options(draw: random.Random) -> Setting:
    def betas() -> tuple[float, float]:
        return draw.uniform(0.5, 0.95), draw.uniform(0.8, 0.999)

    def options(amsgrad: bool) -> dict[str, Any]:
        return {
            "lr": draw.uniform(0.01, 0.1),
            "betas": betas(),
            "eps": draw.uniform(1e-6, 1e-2),
            "weight_decay": draw.uniform(0.01, 0.2),
            "amsgrad": amsgrad,
            "maximize": draw.random() < 0.5,
        }

    of_all = options(draw.random() < 0.5)
    all_options = [(indices, options(bool(n % 2))) for n, indices in enumerate(_GROUPS)]
    groups = leaving_out(all_options, draw, OF_ADAM, added=1)
    changes = {
        step: {
            draw.randrange(2): {
                "lr": draw.uniform(0.01, 0.1),
                "betas": betas(),
                "eps": draw.uniform(1e-6, 1e-2),
                "weight_decay": draw.uniform(0.01, 0.2),
            }
        }
        for step in range(1, 8)
    }
    added = draw.randint(2, 5)
    groups = with_zeros(groups, changes, draw, ({"weight_decay": 0.0},))
    return Setting(options=of_all, groups=groups, added=(added,), changes=changes)


def _one_group(
    options: Callable[[random.Random], dict[str, Any]], draw: random.Random, params: int
) -> Setting:
    """Put all parameters into one group, whose options are rewritten before every other step."""
    groups = ((tuple(range(params)), options(draw)),)
    changes = {step: {0: options(draw)} for step in range(1, 8, 2)}
    return Setting(
        warmup=draw.randint(3, 5), period=2, options=options(draw), groups=groups, changes=changes
    )


def _adamw(plan: Setting) -> Setting:
    """Divide the group in two; the second one has amsgrad, and its options stay."""
    ((indices, options),) = plan.groups
    # The second moment falls soon enough for the largest one to differ from it.
    largest = {"amsgrad": True, "betas": (options["betas"][0], 0.7)}
    groups = ((indices[::2], options), (indices[1::2], {**options, **largest}))
    return replace(plan, groups=groups)


def _adamw_options(draw: random.Random) -> dict[str, Any]:
    return {
        "lr": draw.uniform(0.001, 0.05),
        "betas": (draw.uniform(0.5, 0.95), draw.uniform(0.8, 0.999)),
        "weight_decay": draw.uniform(0.05, 0.5),
    }


def _adagrad_options(draw: random.Random) -> dict[str, Any]:
    return {
        "lr": draw.uniform(0.01, 0.2),
        "lr_decay": draw.uniform(0.05, 0.5),
        "weight_decay": draw.uniform(0.01, 0.2),
    }


def _saved_groups(draw: random.Random) -> Setting:
    warmup = draw.randint(5, 8)
    saves_at = draw.randint(3, warmup - 1)

    def rate() -> dict[str, Any]:
        return {"lr": draw.uniform(0.01, 0.1)}

    of_all = {
        **rate(),
        "betas": (draw.uniform(0.5, 0.9), 0.9),
        "weight_decay": draw.uniform(0.01, 0.2),
    }
    largest = {
        **rate(),
        "betas": (0.9, draw.uniform(0.5, 0.8)),
        "weight_decay": draw.uniform(0.01, 0.2),
        "amsgrad": True,
    }
    others = (
        ((0, 2, 4), {**rate(), "betas": (0.8, 0.95)}),
        ((5, 6), {**rate(), "betas": (draw.uniform(0.5, 0.9), 0.9)}),
        ((7,), {**rate(), "betas": (draw.uniform(0.5, 0.9), 0.9)}),
    )
    first, *later = leaving_out(others, draw, (("lr",), ("betas",)), added=2)
    groups = (first, ((1, 3), largest), *later)
    added = draw.randint(1, saves_at - 1)
    changes: dict[int, dict[int, dict[str, Any]]] = {1: {0: rate(), 1: rate()}}
    changes.setdefault(added, {})[2] = rate()
    # After the save, or the load: its rate is written later, and an average comes after that.
    added_late = draw.randint(saves_at, 9)
    changes.setdefault(added_late + 1, {})[3] = rate()
    # Parameters 0 and 5 have one shape, and 1 and 6 another one. The loaded options count.
    exchanged = {0: 5, 5: 0, 1: 6, 6: 1}
    *loaded, last = groups
    regrouped = tuple(
        (tuple(exchanged.get(index, index) for index in indices), {**options, **rate()})
        for indices, options in loaded
    )
    return Setting(
        warmup=warmup,
        period=3,
        options=of_all,
        groups=groups,
        added=(added, added_late),
        changes=changes,
        saves_at=saves_at,
        regrouped=(*regrouped, last),
        appended=draw.randint(1, 2),
    )


def with_dtypes(scenario: Scenario) -> Scenario:
    """Return the scenario of special values with half precision beside float32."""
    params = (*_PARAMS, Param((31,), "float16"), Param((17,), "bfloat16"))
    return replace(scenario, params=params)
