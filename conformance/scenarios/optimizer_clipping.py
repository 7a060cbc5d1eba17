"""The scenario for optimizer wrappers that clip gradients by their norm themselves.

Trainers call ``optimizer.clip_grad_norm(max_norm)`` if there is such a method (Hugging Face's
Trainer, Lightning, fairseq), since a sharded optimizer may have the gradients of its own share
alone. The norm is that of all gradients of all parameters, whoever has them (fairscale #167).

Gradients have about the same norm for each parameter, whatever its number of elements, up to a
factor of four: a parameter that is left out of the norm shows. All numbers are drawn from the
session's seed.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.optimizer import PLAIN, Setting
from conformance.scenarios.seeds import generator

CLIPPED = replace(
    PLAIN,
    name="optimizer_clipped",
    summary="before some steps clip_grad_norm() of the optimizer is called, if it has that, with a "
    "norm below that of the gradients or above it; in some steps one parameter has no gradient; a "
    "group is added between two clips",
    params=(*PLAIN.params, Param((7,)), Param((11, 3))),
    steps=("normal",) * 9,
    world_sizes=(2, 3, 4),
    variant="clipped",
)

METHODS = ("clip_grad_norm", "clip_grad_norm_")

# The largest norm is a share of the norm of the gradients.
_BELOW = (0.1, 0.9)
_ABOVE = (1.2, 4.0)


def share_of_norm(scenario: Scenario, step: int) -> float | None:
    """Return the share of the gradients' norm that the optimizer clips to before a step.

    It is below 1 in a third of the steps, 0.1 to 0.9; above 1 in another third, 1.2 to 4; in the
    others gradients are not clipped.
    """
    if scenario.variant != CLIPPED.variant:
        return None
    draw = generator(scenario, "shares")
    third = len(scenario.steps) // 3
    shares: list[float | None] = [None] * (len(scenario.steps) - 2 * third)
    shares += [draw.uniform(*_BELOW) for _ in range(third)]
    shares += [draw.uniform(*_ABOVE) for _ in range(third)]
    draw.shuffle(shares)
    return shares[step]


def lacks_gradient(scenario: Scenario, step: int, index: int) -> bool:
    """Whether a parameter has no gradient in a step; in half of the steps one has none.

    Neither has a parameter whose group is added later.
    """
    if scenario.variant != CLIPPED.variant:
        return False
    if index in setting_of_clipped(scenario).in_no_group(step):
        return True
    draw = generator(scenario, f"lacking in {step}")
    return draw.random() < 0.5 and index == draw.randrange(len(scenario.params))


def setting_of_clipped(scenario: Scenario) -> Setting:
    """Return a plan of groups with rates of their own, and of an averager that never averages.

    There are two groups, and a third one is added between two steps whose gradients are clipped to
    a smaller norm, with two parameters at least: one has a gradient in each step. Rates are 0.2 to
    1. Without momentum each step is judged from the parameters before it.
    """
    draw = generator(scenario, "groups")
    indices = list(range(len(scenario.params)))
    draw.shuffle(indices)
    first = draw.randint(2, len(indices) - 4)
    second = draw.randint(first + 2, len(indices) - 2)
    groups = tuple(
        (tuple(sorted(some)), {"lr": draw.uniform(0.2, 1.0)})
        for some in (indices[:first], indices[first:second], indices[second:])
    )
    options = {"lr": draw.uniform(0.2, 1.0), "momentum": 0.0}
    count = len(scenario.steps)
    shares = [share_of_norm(scenario, step) or 1.0 for step in range(count)]
    clipped = [step for step, share in enumerate(shares) if share < 1]
    added = draw.randint(clipped[0] + 1, clipped[-1])
    return Setting(warmup=count + 1, options=options, groups=groups, added=(added,))


def rate_of(scenario: Scenario, index: int) -> float:
    """Return the learning rate of a parameter."""
    groups = setting_of_clipped(scenario).groups
    return next(float(options["lr"]) for indices, options in groups if index in indices)


def _scale(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Give gradients norms of 1/2 to 2 or so, in which every parameter counts."""

    def scaled(spec: Param) -> Param:
        of_elements = math.log2(math.prod(spec.shape)) / 2
        return replace(spec, exponent=numbers.randint(-1, 1) - round(of_elements))

    return replace(scenario, params=tuple(map(scaled, scenario.params)))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {CLIPPED.name: _scale}
