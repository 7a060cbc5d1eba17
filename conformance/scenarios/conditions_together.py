"""Scenarios of other kinds than hooks in which conditions of training come together.

Other scenarios change one thing at a time, so that a failure has one reason. A defect that needs
two conditions passes them all. Here conditions come together, every pair in some run:

*_together       five to eight ranks, half of all sessions eight, on two simulated nodes; float32,
                 float64, float16 and bfloat16 in one model; torch's default dtype is float64,
                 float16 or bfloat16, and changes. An averager and an optimizer are saved at a drawn
                 step, and another run continues; the optimizer has 12 to 24 parameter groups of
                 float32 alone, and its options are rewritten before every other step. A strategy
                 has up to nine micro-batches a step, which use different parameters, under both of
                 DDP's options.
*_special_together
                 the same ranks and default dtypes, with NaN, infinities and float16 near its limit
*_together_long  300 to 420 steps on two ranks, made under bfloat16, which counts to 256 only; an
                 averager and an optimizer are saved after more than 256 steps, and another run
                 continues

Wrappers issue no collectives, and have no states: their runs have autocast, graphs, indices and
the long run under other default dtypes. All of these numbers are drawn from the session's seed.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios import (
    averager,
    averager_training,
    collective,
    collective_training,
    optimizer,
    optimizer_training,
    strategy,
    strategy_training,
    wrapper_graphs,
    wrapper_training,
)
from conformance.scenarios.model import DDPOptions, Observation, Param, Resume, Scenario
from conformance.scenarios.seeds import shared_generator

DTYPES = ("float64", "float16", "bfloat16")
LONG_STEPS = (300, 420)
# bfloat16 has no whole number between 256 and 258.
BEYOND_BFLOAT16 = 258

Draw = Callable[[Scenario, random.Random], Scenario]

_LONG = "_together_long"
_RESUMED = "_resumed"
_SIZE = 8  # it is drawn

# Of each dtype one small parameter and one whose size is drawn.
_MIXED = (
    *(Param((11,), dtype) for dtype in ("float32", *DTYPES)),
    *(Param((5004,), dtype) for dtype in ("float32", *DTYPES)),
)


def _on_ranks(plain: Scenario, name: str, summary: str) -> Scenario:
    return replace(
        plain,
        name=name,
        summary=f"{summary}; 5 to 8 ranks on two nodes, four dtypes, other default dtypes; every "
        "other rank has another hash seed",
        hash_seeds_differ=True,
        params=_MIXED,
        world_sizes=(),
        size=_SIZE,
        nodes=(_SIZE // 2, _SIZE // 2),
        default_dtypes=DTYPES,
    )


def _special(plain: Scenario) -> Scenario:
    return replace(
        plain,
        name=f"{plain.kind}_special_together",
        summary=f"the scenario `{plain.name}`; on 5 to 8 ranks and under other default dtypes",
        world_sizes=(),
        size=_SIZE,
        nodes=(_SIZE // 2, _SIZE // 2),
        default_dtypes=DTYPES,
    )


def _long(plain: Scenario, *, summary: str = "") -> Scenario:
    return replace(
        plain,
        name=plain.kind + _LONG,
        summary=(
            summary
            or f"{LONG_STEPS[0]} to {LONG_STEPS[1]} steps under bfloat16 as torch's default dtype"
        )
        + ("; every other rank has another hash seed" if plain.hash_seeds_differ else ""),
        world_sizes=(2,),
        default_dtypes=("bfloat16",),
        observe=Observation(),
    )


def _saved(scenario: Scenario) -> tuple[Scenario, Scenario]:
    """Return the scenario with a save at a drawn step, and the one that continues from there."""
    saved = replace(
        scenario,
        summary=f"{scenario.summary}; the state is saved at a drawn step",
        resume=Resume(saves_at=1),
    )
    resumed = replace(
        saved,
        name=saved.name + _RESUMED,
        summary=f"new processes continue from the state of `{saved.name}`",
        prerequisite=saved.name,
        resume=Resume(saves_at=1, resumes=True),
    )
    return saved, resumed


AVERAGER = (
    *_saved(_on_ranks(averager.RANDOM, "averager_together", "random values, float16 near 40,000")),
    *_saved(_long(averager_training.LONG)),
)
OPTIMIZER_SPECIAL = _special(optimizer_training.SPECIAL)
OPTIMIZER = (
    *_saved(
        replace(
            _on_ranks(optimizer.RANDOM, "optimizer_together", "12 to 24 groups of SGD"),
            variant="together",
            # ZeRO takes one dtype in a model.
            summary="12 to 24 groups of SGD; 5 to 8 ranks on two nodes, other default dtypes; "
            "every other rank has another hash seed",
            params=(Param((5004,)), *(Param((size,)) for size in range(1, 24))),
        )
    ),
    *_saved(_long(optimizer_training.LONG)),
    OPTIMIZER_SPECIAL,
)
STRATEGY = (
    replace(
        _on_ranks(
            strategy.RANDOM,
            "strategy_together",
            "find_unused_parameters and views; steps of up to nine micro-batches, which use "
            "different parameters",
        ),
        ddp=DDPOptions(
            bucket_cap_mb=strategy.PLAIN.ddp.bucket_cap_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        ),
        variant="together",
        prerequisite="strategy_ranks",
    ),
    _long(strategy_training.LONG),
    _special(strategy_training.SPECIAL),
)
COLLECTIVE = (
    replace(
        _on_ranks(collective.FORMS, "collective_together", "tensors of all forms, tiny values"),
        params=collective.FORMS.params,
        steps=("crafted", "normal", "tiny", "uneven"),
    ),
    _long(
        collective_training.LONG,
        summary=f"{LONG_STEPS[0]} to {LONG_STEPS[1]} calls under bfloat16 as torch's default dtype",
    ),
)


def _wrapper(plain: Scenario) -> Scenario:
    return replace(
        plain,
        name=f"{plain.name}_together",
        summary=f"the scenario `{plain.name}`; torch's default dtype is float64, float16 and "
        "bfloat16",
        default_dtypes=DTYPES,
    )


WRAPPER = (
    *map(_wrapper, (wrapper_training.HALF, wrapper_graphs.GRAPHS, wrapper_training.INDICES)),
    _long(wrapper_training.LONG),
)

ALL = (*AVERAGER, *OPTIMIZER, *STRATEGY, *COLLECTIVE, *WRAPPER)


def is_long(scenario: Scenario) -> bool:
    """Whether a scenario has the long runs of this module."""
    return _LONG in scenario.name


def _draw(scenario: Scenario, _: random.Random) -> Scenario:
    """Draw the ranks, the nodes, the order of default dtypes, and the sizes of large parameters:
    2**10 to 2**14 elements, every size as likely as its double.
    """
    numbers = shared_generator(scenario, "conditions")
    params = tuple(
        replace(spec, shape=(round(2 ** numbers.uniform(10, 14)),))
        if spec.shape == (5004,)
        else spec
        for spec in scenario.params
    )
    scenario = replace(scenario, params=params)
    if scenario.size:
        size = numbers.choice((5, 6, 7, 8, 8, 8))
        first = numbers.randint(1, size - 1)
        scenario = replace(scenario, size=size, nodes=(first, size - first))
    if len(scenario.default_dtypes) > 1:
        dtypes = tuple(numbers.sample(DTYPES, len(DTYPES)))
        scenario = replace(scenario, default_dtypes=dtypes)
    if scenario.resume.saves_at:
        saves_at = numbers.randint(2, len(scenario.steps) - 2)
        scenario = replace(scenario, resume=replace(scenario.resume, saves_at=saves_at))
    return scenario


def _draw_steps(scenario: Scenario, _: random.Random) -> Scenario:
    """Draw the number of steps, and the step of a save, which is beyond the 256th."""
    numbers = shared_generator(scenario, "steps")
    count = numbers.randint(*LONG_STEPS)
    scenario = replace(scenario, steps=scenario.steps[:1] * count)
    if scenario.resume.saves_at:
        saves_at = numbers.randint(BEYOND_BFLOAT16, count - 20)
        scenario = replace(scenario, resume=replace(scenario.resume, saves_at=saves_at))
    return scenario


def _then(first: Draw, second: Draw) -> Draw:
    return lambda scenario, numbers: second(first(scenario, numbers), numbers)


DRAWS: Mapping[str, Draw] = {
    **dict.fromkeys((scenario.name for scenario in ALL), _draw),
    **dict.fromkeys((scenario.name for scenario in ALL if is_long(scenario)), _draw_steps),
    "collective_together_long": collective_training.draw_long,
    "wrapper_together_long": wrapper_training.draw_long,
    "wrapper_graphs_together": _then(_draw, wrapper_graphs.draw_graphs),
    "wrapper_indices_together": _then(_draw, wrapper_training.draw_indices),
}
