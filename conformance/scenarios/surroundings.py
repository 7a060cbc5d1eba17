"""Scenarios of other surroundings: torch's default dtype, the clock, another model's backward.

A hook takes these for granted on a machine where nothing else is going on. In a training script the
default dtype may be another one, clocks of machines differ, and one backward may go through two
models.
"""

import random
from dataclasses import replace

from conformance.scenarios.hook import BUCKETS, TWO_MODELS, VALUES
from conformance.scenarios.model import Scenario

_OTHER_DTYPES = ("float64", "float16", "bfloat16")

DEFAULT_DTYPES = replace(
    VALUES,
    name="default_dtypes",
    summary="torch's default dtype is float64, float16 and bfloat16, in steps in an order that is "
    "drawn",
    steps=("crafted", "normal", "crafted", "normal", "crafted", "normal"),
    world_sizes=(2,),
    default_dtypes=_OTHER_DTYPES,
)

CLOCKS = replace(
    BUCKETS,
    name="clocks",
    summary="between steps, the clocks of each rank go forward by another time, from a second to "
    "two hours",
    steps=("crafted",) * 16,
    clocks_jump=True,
    prerequisite="buckets",
)

# Backward goes through the twin first, whose forward comes last. The callbacks of both models run
# after the last call of the hook, as they do if communication takes longer than backward.
#
# Two ranks, on a group of their own: the twin's gradients are recorded by groups.
JOINT = replace(
    BUCKETS,
    name="joint",
    summary="the losses of two models with the same subject are added, and one backward goes "
    "through both; several buckets each; callbacks run after the last call, in an order that "
    "is drawn",
    steps=("crafted", "crafted", "normal", "crafted"),
    size=2,
    twin=True,
    joint=True,
    order="seeded",
    seed=3,
    twin_groups=((0, 1),),
    prerequisite=TWO_MODELS.name,
)

ALL = (DEFAULT_DTYPES, CLOCKS, JOINT)


def with_ranks(scenario: Scenario, count: int) -> Scenario:
    """Return the scenario ``joint`` with a number of ranks."""
    return replace(scenario, size=count, twin_groups=(tuple(range(count)),))


def draw_default_dtypes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the order of the three dtypes."""
    order = numbers.sample(_OTHER_DTYPES, len(_OTHER_DTYPES))
    return replace(scenario, default_dtypes=tuple(order))


DRAWS = {DEFAULT_DTYPES.name: draw_default_dtypes}
