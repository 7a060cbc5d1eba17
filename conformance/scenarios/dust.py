"""The scenario of dust: most elements of a bucket are thousands of times smaller than the others.

One element of forty is normally distributed, with a deviation of a quarter. All others have one
size, 2**-15 to 2**-19, which the session's seed gives. They are a small part of the sum of all
elements, and of the norm: a random selection sends each of them with a small probability, and
rounding to levels seldom takes them for more than 0.
"""

import random
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

DUST = "dust"
TRIALS = 96
EVERY = 40  # one element of so many is no dust
_EXPONENTS = (-19, -15)

OF_DUST = Scenario(
    name="dust",
    summary="most elements are 2**-15 to 2**-19 of the others; the same gradients in every step",
    params=(Param((65_519,)),),
    steps=(f"{DUST}/{_EXPONENTS[1]}",) * TRIALS,
    world_sizes=(2,),
    prerequisite="values",
)


def draw_dust(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the size of the dust."""
    return replace(scenario, steps=(f"{DUST}/{numbers.randint(*_EXPONENTS)}",) * TRIALS)
