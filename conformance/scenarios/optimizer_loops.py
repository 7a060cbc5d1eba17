"""Scenarios for optimizer wrappers: what the loops of training do between steps, and around them.

Parameters are written between steps, or replaced by other ones in their groups; or the whole loop
is under autocast. All numbers are drawn from the session's seed.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.optimizer import PLAIN, RANDOM, START, Setting, Write, Writing
from conformance.scenarios.seeds import generator
from conformance.scenarios.tables import prime_from

WRITTEN = replace(
    PLAIN,
    name="optimizer_written",
    summary="parameters are written between steps, by load_state_dict of the model and in place; "
    "before a drawn step everything is restored to an earlier step",
    steps=("normal",) * 11,
    world_sizes=(2,),
    variant="written",
)

WRITTEN_ONE_DTYPE = replace(
    WRITTEN,
    name="optimizer_written_one_dtype",
    summary="the scenario `optimizer_written` with parameters of float64, float16 or bfloat16, as "
    "drawn; some get new memory",
)

WRITTEN_DTYPES = replace(
    WRITTEN,
    name="optimizer_written_dtypes",
    summary="the scenario `optimizer_written` with parameters of four dtypes; some get new memory",
    params=tuple(
        Param((1,), dtype)
        for dtype in ("float32", "float64", "float16", "bfloat16")
        for _ in range(2)
    ),
)

RENEWED = replace(
    PLAIN,
    name="optimizer_renewed",
    summary="other parameters take the place of some in their groups, in an optimizer that averages"
    " parameters or gradients",
    steps=("normal",) * 9,
    world_sizes=(2,),
    variant="renewed",
)

RESET = replace(
    PLAIN,
    name="optimizer_reset",
    summary="everything is restored to the beginning, when no parameter had a state",
    steps=("normal",) * 10,
    world_sizes=(2,),
    variant="reset",
)

RESET_EARLY = replace(
    RESET,
    name="optimizer_reset_early",
    summary="everything is restored to an early step, when some parameters were not trained yet",
)

AUTOCAST = replace(
    RANDOM,
    name="optimizer_autocast",
    summary="random values, in two large parameters too, under autocast to bfloat16; some steps "
    "have a closure",
    steps=("normal",) * 4,
    world_sizes=(2,),
    variant="autocast",
)

AUTOCAST_HALF = replace(
    AUTOCAST,
    name="optimizer_autocast_half",
    summary="the scenario `optimizer_autocast` under autocast to float16",
    options=("autocast=float16",),
)

ALL = (
    WRITTEN,
    WRITTEN_ONE_DTYPE,
    WRITTEN_DTYPES,
    RENEWED,
    RESET,
    RESET_EARLY,
    AUTOCAST,
    AUTOCAST_HALF,
)

# Written values are made like the gradients of these steps, which no scenario reaches.
WRITTEN_VALUES = START + 10


def written(scenario: Scenario) -> Setting:
    """Return the plan of steps before which parameters are written.

    One write comes before the first step, one before the step that is restored later, and one after
    the restored one. In the scenarios that may be refused, one of the last two gives parameters new
    memory.
    """
    draw = generator(scenario)
    params = len(scenario.params)
    saved = draw.randint(2, 3)
    restored = draw.randint(saved + 2, 7)
    steps = (0, draw.randint(1, saved), draw.randint(restored + 1, 9))
    ways = draw.sample((Writing.LOADED, Writing.IN_DATA, Writing.ONE_ELEMENT), 3)
    if scenario.name != WRITTEN.name:
        ways[draw.choice((1, 2))] = Writing.NEW_MEMORY
    writes = {
        step: Write(way, _some(draw, params), draw.random())
        for step, way in zip(steps, ways, strict=True)
    }
    return replace(_options(draw), writes=writes, back=(restored, saved))


def renewed(draw: random.Random, params: int) -> Setting:
    """Return the plan of steps before which some parameters are replaced by others."""
    steps = sorted(draw.sample(range(1, 8), 2))
    ways = draw.sample((Writing.NEW_ITEM, Writing.NEW_LIST), 2)
    writes = {
        step: Write(way, _some(draw, params), draw.random())
        for step, way in zip(steps, ways, strict=True)
    }
    return replace(_options(draw), writes=writes)


def reset(scenario: Scenario) -> Setting:
    """Return the plan of a training that begins anew, or nearly so."""
    draw = generator(scenario)
    saved = -1 if scenario.name == RESET.name else draw.randint(0, 2)
    return replace(_options(draw), back=(draw.randint(saved + 4, 7), saved))


def trained_late(scenario: Scenario) -> tuple[int, tuple[int, ...]]:
    """Return the step from which on some parameters are trained, and these parameters.

    It comes after the step that is restored, and before the one that restores it.
    """
    draw = generator(scenario, "late")
    restored, saved = reset(scenario).back
    late = _some(draw, len(scenario.params))
    return draw.randint(saved + 1, restored - 2), late


def _options(draw: random.Random) -> Setting:
    return Setting(
        warmup=draw.randint(1, 4),
        period=draw.randint(2, 3),
        options={
            "lr": draw.uniform(0.05, 0.2),
            "momentum": draw.uniform(0.5, 0.95),
            "weight_decay": draw.uniform(0.01, 0.1),
        },
    )


def _some(draw: random.Random, params: int) -> tuple[int, ...]:
    return tuple(sorted(draw.sample(range(params), draw.randint(1, params - 1))))


def _draw_dtype(scenario: Scenario, numbers: random.Random) -> Scenario:
    dtype = numbers.choice(("float64", "float16", "bfloat16"))
    return replace(scenario, params=tuple(replace(spec, dtype=dtype) for spec in scenario.params))


def _draw_sizes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw sizes of 1 to 1,000 elements, every size as likely as its double."""
    sizes = [round(2 ** numbers.uniform(0, 10)) for _ in scenario.params]
    params = zip(scenario.params, sizes, strict=True)
    return replace(scenario, params=tuple(replace(spec, shape=(size,)) for spec, size in params))


def _draw_large(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Add a parameter of 2**10 to 2**17 elements, and one of 2**17 to 2**19."""
    sizes = [prime_from(round(2 ** numbers.uniform(*range_))) for range_ in ((10, 17), (17, 19))]
    numbers.shuffle(sizes)
    large = tuple(Param((size,)) for size in sizes)
    return replace(scenario, params=(*scenario.params, *large))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    WRITTEN_ONE_DTYPE.name: _draw_dtype,
    WRITTEN_DTYPES.name: _draw_sizes,
    AUTOCAST.name: _draw_large,
    AUTOCAST_HALF.name: _draw_large,
}
