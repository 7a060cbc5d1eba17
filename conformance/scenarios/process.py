"""The scenario in which memory is measured with large parameters, for section 9.

Side effects are recorded in every scenario. This one adds size and length: a subject may keep
memory, draw a random number or change a parameter only if there are more elements than some
threshold.
"""

import math
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

ALL = (HEAVY,)


def with_warmup(scenario: Scenario, warmup: int) -> Scenario:
    """Return the scenario with steps of a warm-up before its own.

    All steps together feed as many elements as without a warm-up.
    """
    steps = len(scenario.steps) + warmup
    side = math.isqrt(_SIDE**2 * _STEPS // steps)
    params = (Param((side, side)), *scenario.params[1:])
    return replace(scenario, params=params, steps=(_KIND,) * steps)
