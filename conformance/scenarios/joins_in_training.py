"""The scenarios for joins as in training: numbers, long epochs, many epochs, and interrupts.

The numbers of inputs are drawn (``join_draws.py``).
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.joinable import DDP, PLAIN
from conformance.scenarios.model import Observation, Scenario

NUMBERS = replace(
    PLAIN,
    name="joinable_numbers",
    summary="a joinable that trains on drawn numbers of inputs; its gradients and its state; two "
    "contexts have two or three joinables of the target",
    variant="numbers",
    world_sizes=(2, 3),
)

COUNTS = replace(
    PLAIN,
    name="joinable_counts",
    summary="a joinable whose integers that count steps or inputs are those after days of "
    "training, and in int64 and float64 then beyond those of int32; uneven inputs, and all "
    "numbers, are drawn",
    variant="counts",
    world_sizes=(2,),
)

# Beyond 2**28, float32 has one integer of 32 or more.
LARGE_COUNTS = (2**28, 2**30)
# Beyond those of int32 and of uint32: tokens or samples, which int64 or float64 counts.
HUGE_COUNTS = (2**33, 2**40)

LONG = replace(
    PLAIN,
    name="joinable_long",
    summary="hundreds of inputs on one rank and none on the others, then more than a thousand; "
    "their numbers are drawn",
    variant="long",
    world_sizes=(2,),
    observe=Observation(),  # sums show the order; 3,000 records of collectives would take seconds
    most_inputs=2000,
)

LONG_EPOCH = replace(
    LONG,
    name="joinable_long_epoch",
    summary="a joinable with hundreds of inputs more on one rank; their numbers are drawn",
    variant="long_epoch",
    most_inputs=603,
)

INTERRUPTS = replace(
    PLAIN,
    name="joinable_interrupts",
    summary="KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit and BaseException in the "
    "body",
    variant="interrupts",
    world_sizes=(2,),
)

HOOKS_RAISE = replace(
    PLAIN,
    name="joinable_hooks_raise",
    summary="a main hook that raises on a rank without inputs, and a post hook that raises",
    variant="hooks_raise",
    world_sizes=(2,),
)

EPOCHS = replace(
    DDP,
    name="joinable_epochs",
    summary="the same DDP and the kit's joinables in 5 to 8 contexts, in drawn orders, with drawn "
    "numbers of inputs",
    variant="epochs",
    world_sizes=(2, 3),
)

MANY_CONTEXTS = (100, 150)

# A step of the scenario is a context.
MANY = replace(
    PLAIN,
    name="joinable_many",
    summary=f"{MANY_CONTEXTS[0]} to {MANY_CONTEXTS[1]} contexts of the same joinables, with up to "
    "four inputs on each rank; one of five ends with an exception; all of it is drawn",
    steps=("context",) * MANY_CONTEXTS[0],
    variant="many",
    world_sizes=(2,),
    observe=Observation(growth=True),
    most_inputs=4 * MANY_CONTEXTS[1],
)


def draw_many(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the number of contexts."""
    return replace(scenario, steps=scenario.steps[:1] * numbers.randint(*MANY_CONTEXTS))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {MANY.name: draw_many}

ALL = (NUMBERS, COUNTS, LONG, LONG_EPOCH, INTERRUPTS, HOOKS_RAISE, EPOCHS, MANY)
