"""The scenario for optimizer wrappers whose parameters are all of half precision.

Optimizers step weights of half precision by code of their own: copies in float32, made for some
parameters, with gradients that are collected at some time. So the conditions of other scenarios
come once more: parameters without a gradient, closures, a group that is added, and ``zero_grad()``.
Weight decay moves a parameter whose missing gradient counts as zeros. All numbers are drawn from
the session's seed.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.optimizer import PLAIN, Setting
from conformance.scenarios.seeds import generator

HALF = replace(
    PLAIN,
    name="optimizer_in_half",
    summary="all parameters are of float16, or all of bfloat16, as drawn; in most steps one has no "
    "gradient on any rank; some steps have a closure; a group is added; zero_grad() clears "
    "gradients before each step",
    params=tuple(replace(param, dtype="bfloat16") for param in (*PLAIN.params, Param((3, 2)))),
    steps=("normal",) * 12,
    world_sizes=(2,),
    variant="in_half",
)

_DTYPES = ("float16", "bfloat16")
# The parameters of the added group, and of the groups at the construction.
_ADDED = (1, 5)
_FIRST = ((0, 3), (2, 4))


def is_closed_in_half(scenario: Scenario, step: int) -> bool:
    """Whether a step of the scenario has a closure; closures come before the added group."""
    if scenario.variant != HALF.variant:
        return False
    added = setting_in_half(scenario).added[0]
    return step in generator(scenario, "closures").sample(range(added), added // 2)


def lacks_gradient_in_half(scenario: Scenario, step: int, index: int) -> bool:
    """Whether no rank has a gradient for a parameter in a step.

    In the first step each has one. In two thirds of the others a parameter of the first groups
    has none.
    """
    if scenario.variant != HALF.variant or step == 0:
        return False
    later = range(1, len(scenario.steps))
    lacking = generator(scenario, "lacking").sample(later, 2 * len(later) // 3)
    chosen = generator(scenario, f"lacking in {step}").choice([i for of in _FIRST for i in of])
    return step in lacking and index == chosen


def setting_in_half(scenario: Scenario) -> Setting:
    """Return a plan of three groups with rates and decays of their own; the last one is added.

    Rates are 0.3 to 1, and decays 0.1 to 0.3. Without momentum each step is judged from the
    parameters before it.
    """
    draw = generator(scenario, "groups")
    groups = tuple(
        (indices, {"lr": draw.uniform(0.3, 1.0), "weight_decay": draw.uniform(0.1, 0.3)})
        for indices in (*_FIRST, _ADDED)
    )
    options = {"lr": draw.uniform(0.3, 1.0), "momentum": 0.0, "weight_decay": 0.0}
    return Setting(
        warmup=draw.randint(2, 4),
        period=3,
        options=options,
        groups=groups,
        added=(draw.randint(4, 7),),
    )


def _draw_dtype(scenario: Scenario, numbers: random.Random) -> Scenario:
    dtype = numbers.choice(_DTYPES)
    return replace(scenario, params=tuple(replace(param, dtype=dtype) for param in scenario.params))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {HALF.name: _draw_dtype}
