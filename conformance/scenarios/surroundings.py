"""Scenarios of other surroundings: torch's default dtype, autocast, the clock, another model's
backward.

A hook takes these for granted on a machine where nothing else is going on. In a training script the
default dtype may be another one, clocks of machines differ, and one backward may go through two
models.
"""

import random
from dataclasses import replace

from conformance.scenarios.hook import BUCKETS, TWO_MODELS, VALUES
from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.scenarios.tables import prime_from
from conformance.scenarios.training_sizes import mostly_small_sizes

_HALVES = ("float16", "bfloat16")
_OTHER_DTYPES = ("float64", *_HALVES)
_LARGEST_SIZE = 600_000
_LARGE_SIZES = 2

# Three ranks: a half dtype holds 1/2 and 1/4, but not 1/3.
DEFAULT_DTYPES = replace(
    VALUES,
    name="default_dtypes",
    summary="torch's default dtype is float16, bfloat16 or float64 in each step, in an order that "
    "is drawn; buckets of tens to hundreds of thousands of elements, which are drawn too",
    steps=("crafted", "normal", "crafted", "normal", "normal", "normal"),
    world_sizes=(3,),
    ddp=DDPOptions(bucket_cap_mb=16 / 2**20),
    default_dtypes=(*_HALVES, "float64", *_OTHER_DTYPES),
)

AUTOCAST = replace(
    DEFAULT_DTYPES,
    name="autocast",
    summary="backward runs under autocast, to float16 and bfloat16 in turns; buckets of tens to "
    "hundreds of thousands of elements, which are drawn",
    default_dtypes=(),
    variant="autocast",
    options=(f"autocast={'/'.join(_HALVES)}",),
)

CLOCKS = replace(
    BUCKETS,
    name="clocks",
    summary="the clocks of each rank go forward by other times: between steps from a hundredth of "
    "a second to ten days, and within a step by up to a second",
    steps=("crafted",) * 16,
    clocks_jump=True,
    prerequisite="buckets",
)

# Backward goes through the twin first, whose forward comes last. The callbacks of both models run
# after the last call of the hook, as they do if communication takes longer than backward.
#
# The groups of the models differ in size: a callback that reads the group of the latest call, and
# not of its own, divides by another number of ranks.
JOINT = replace(
    BUCKETS,
    name="joint",
    summary="the losses of two models with the same subject are added, and one backward goes "
    "through both; one is on WORLD, and one on a group of some of its ranks; several buckets "
    "each; callbacks run after the last call, in an order that is drawn; so are the groups",
    steps=("crafted", "crafted", "normal", "crafted"),
    size=3,
    twin=True,
    joint=True,
    order="seeded",
    seed=3,
    twin_groups=((0, 2), (1,)),
    prerequisite=TWO_MODELS.name,
)

# Both models have equal buckets in equal numbers, and the same group: what a hook keeps for a call
# under way by any of these is that of the other model.
JOINT_ALIKE = replace(
    JOINT,
    name="joint_alike",
    summary="the scenario `joint` with two models that are alike, on the same group",
    size=0,
    world_sizes=(2,),
    twin_groups=(),
)

ALL = (DEFAULT_DTYPES, AUTOCAST, CLOCKS, JOINT, JOINT_ALIKE)


def _draw_joint(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw three or four ranks, and the one that is alone in its twin's group."""
    size = numbers.choice((3, 4))
    alone = numbers.randrange(size)
    others = tuple(rank for rank in range(size) if rank != alone)
    return replace(scenario, size=size, twin_groups=(others, (alone,)))


def _draw_order(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the order in which callbacks run."""
    return replace(scenario, seed=numbers.randrange(1000))


def draw_default_dtypes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the order of the dtypes, and ten sizes from 16 to 600,000 elements, as for autocast.

    The first two steps have a half dtype each: a tensor that a hook makes then and keeps loses
    digits, which a tensor of float64 does not. The third step has float64, and the other three have
    all three dtypes in any order. Most sizes are small (``mostly_small_sizes``). Gradients repeat a
    table of a prime length from 3,000 to 6,000.
    """
    sized = _draw_sizes(scenario, numbers)
    halves = numbers.sample(_HALVES, len(_HALVES))
    others = numbers.sample(_OTHER_DTYPES, len(_OTHER_DTYPES))
    return replace(sized, default_dtypes=(*halves, "float64", *others))


def _draw_autocast(scenario: Scenario, numbers: random.Random) -> Scenario:
    sized = _draw_sizes(scenario, numbers)
    halves = numbers.sample(_HALVES, len(_HALVES))
    return replace(sized, options=(f"autocast={'/'.join(halves)}",))


def feed_narrow_values(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Return ``autocast`` with values that float16 holds in one of its last two steps, and values
    that bfloat16 holds in the other, in a drawn order: a backward under autocast leaves such
    gradients in float32, and their sum needs it all the same.
    """
    narrow = [f"narrow_{dtype}" for dtype in numbers.sample(_HALVES, len(_HALVES))]
    return replace(scenario, steps=(*scenario.steps[: -len(narrow)], *narrow))


def _draw_sizes(scenario: Scenario, numbers: random.Random) -> Scenario:
    sizes = mostly_small_sizes(_LARGEST_SIZE, _LARGE_SIZES, numbers)
    numbers.shuffle(sizes)
    return replace(
        scenario,
        params=tuple(Param((size,)) for size in sizes),
        period=prime_from(numbers.randint(3000, 6000)),
    )


def with_small_parameters(scenario: Scenario) -> Scenario:
    """Return ``default_dtypes``, or ``autocast``, with one small bucket of values that do not
    repeat.
    """
    return replace(scenario, params=VALUES.params, ddp=VALUES.ddp, period=0)


DRAWS = {
    DEFAULT_DTYPES.name: draw_default_dtypes,
    AUTOCAST.name: _draw_autocast,
    JOINT.name: _draw_joint,
    JOINT_ALIKE.name: _draw_order,
}
