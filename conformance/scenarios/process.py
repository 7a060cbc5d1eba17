"""The scenarios in which memory is measured with large parameters, for section 9.

Side effects are recorded in every scenario. These add size and length: a subject may keep memory,
draw a random number or change a parameter only if there are more elements than some threshold.
Memory for half precision is often taken by code of its own, for sums in float32.
"""

import math
import random
from dataclasses import replace

from conformance.scenarios.model import DDPOptions, Observation, Param, Scenario

# 3163 is the first integer whose square is above ten million.
_SIDE = 3163
_STEPS = 6
_KIND = "flat"

# All parameters in one bucket: a chained hook must not depend on the order of several. DDP fills
# its buckets from the last parameter on, and closes one once it has reached the cap.
HEAVY = Scenario(
    name="heavy",
    summary="a bucket of more than ten million elements, six steps; memory is measured",
    params=(Param((_SIDE, _SIDE)), Param((17,)), Param((5, 3)), Param((7,))),
    steps=(_KIND,) * _STEPS,
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=64.0),
    observe=Observation(memory=True, gradients=False),
)

HEAVY_HALF = replace(
    HEAVY,
    name="heavy_half",
    summary="a bucket of 0.5 to 2 million elements of bfloat16 or float16, six steps; memory is "
    "measured; the size and the dtype are drawn",
    params=tuple(
        Param(spec.shape, "bfloat16") for spec in (Param((1024, 1024)), *HEAVY.params[1:])
    ),
)

ALL = (HEAVY, HEAVY_HALF)


def draw_half(scenario: Scenario, draws: random.Random) -> Scenario:
    """Draw the dtype, and the side of the large matrix."""
    dtype = draws.choice(("bfloat16", "float16"))
    side = draws.randint(708, 1448)
    shapes = ((side, side), *(spec.shape for spec in scenario.params[1:]))
    return replace(scenario, params=tuple(Param(shape, dtype) for shape in shapes))


DRAWS = {HEAVY_HALF.name: draw_half}


def with_warmup(scenario: Scenario, warmup: int) -> Scenario:
    """Return a scenario of these with steps of a warm-up before its own.

    All steps together feed as many elements as without a warm-up.
    """
    steps = len(scenario.steps) + warmup
    first = scenario.params[0]
    side = math.isqrt(math.prod(first.shape) * _STEPS // steps)
    params = (replace(first, shape=(side, side)), *scenario.params[1:])
    return replace(scenario, params=params, steps=(_KIND,) * steps)
