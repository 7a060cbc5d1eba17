"""Scenarios for optimizer wrappers: some steps are repeated from a restored state.

With the same gradients they give the same bits as before the state was loaded, in half precision,
too. Bounds of half precision are wide: a state in float32 that a load rounds to the dtype of its
parameter, as ``torch.optim.Optimizer.load_state_dict`` does, stays within them. So do weights in
float32 that an optimizer without any has no place for, as in a new process. All numbers are drawn
from the session's seed.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.optimizer import PLAIN, Setting
from conformance.scenarios.optimizer_rests import rests, step_of_gradients
from conformance.scenarios.seeds import generator

# The number of steps that are repeated, and how often they are made altogether.
REPEATED_STEPS = 4
PASSES = 5

REPEATED_BFLOAT16 = replace(
    PLAIN,
    name="optimizer_repeated_bfloat16",
    summary="four steps of parameters of bfloat16 are repeated four times, each time from the "
    "restored state before them; once the state of the beginning is loaded first, and then model "
    "and optimizer are made anew",
    params=tuple(replace(param, dtype="bfloat16") for param in PLAIN.params),
    steps=("normal",) * 26,
    world_sizes=(2,),
    variant="repeated",
)

REPEATED_FLOAT16 = replace(
    REPEATED_BFLOAT16,
    name="optimizer_repeated_float16",
    summary="the scenario `optimizer_repeated_bfloat16` with parameters of float16",
    params=tuple(replace(param, dtype="float16") for param in PLAIN.params),
)

ALL = (REPEATED_BFLOAT16, REPEATED_FLOAT16)


def repeated(scenario: Scenario) -> Setting:
    """Return the plan of steps that are repeated."""
    draw = generator(scenario, "options")
    saved = draw.randint(2, len(scenario.steps) - PASSES * REPEATED_STEPS - 1)
    first, *others = range(
        saved + 1 + REPEATED_STEPS, saved + 1 + PASSES * REPEATED_STEPS, REPEATED_STEPS
    )
    return Setting(
        warmup=draw.randint(1, 4),
        period=draw.randint(2, 3),
        options={
            "lr": draw.uniform(0.05, 0.2),
            "momentum": draw.uniform(0.5, 0.95),
            "weight_decay": draw.uniform(0.01, 0.1),
        },
        back=(first, saved),
        again=tuple(others),
        emptied=others[-2],
        remade=others[-1],
    )


def is_repeated(scenario: Scenario) -> bool:
    """Whether steps of a scenario are repeated."""
    return scenario.variant == REPEATED_BFLOAT16.variant


def source_step(scenario: Scenario, step: int) -> int:
    """Return the step whose gradients a step has: its own, or that of the step that it repeats.

    Of the hundreds of steps of a run in which parameters rest some have gradients of their own.
    """
    if rests(scenario):
        return step_of_gradients(scenario, step)
    if not is_repeated(scenario):
        return step
    first = repeated(scenario).back[1] + 1
    after = step - first
    return first + after % REPEATED_STEPS if 0 <= after < PASSES * REPEATED_STEPS else step


def _add_large(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Add a parameter of 2**8 to 2**13 elements."""
    dtype = scenario.params[0].dtype
    large = Param((round(2 ** numbers.uniform(8, 13)),), dtype)
    return replace(scenario, params=(*scenario.params, large))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    scenario.name: _add_large for scenario in ALL
}
