"""The scenario of dust: most elements of a bucket are thousands of times smaller than the others.

One element of forty is normally distributed, with a deviation of a quarter. All others have one
size, 2**-15 to 2**-19, which the session's seed gives. They are a small part of the sum of all
elements, and of the norm: a random selection sends each of them with a small probability, and
rounding to levels seldom takes them for more than 0.

A second parameter has as many elements in half precision, bfloat16 or float16, and a bucket of its
own. Random numbers of these dtypes are multiples of 2**-8 and of 2**-11: a coin that is drawn in
the dtype of the bucket has no smaller probability. Its dust is 2**-13 to 2**-10, or 2**-15 to
2**-13.

The kind of the steps, ``dust/E/F``, names both exponents.
"""

import random
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

DUST = "dust"
TRIALS = 160
EVERY = 40  # one element of so many is no dust
_EXPONENTS = (-19, -15)
# In units of the last place of 1 the dust of both is about as small.
_EXPONENTS_OF_HALF = {"bfloat16": (-13, -10), "float16": (-15, -13)}
_NUMEL = 65_519

OF_DUST = Scenario(
    name="dust",
    summary="most elements are 2**-15 to 2**-19 of the others, and 2**-10 to 2**-15 in a second "
    "parameter of bfloat16 or float16; the same gradients in every step",
    params=(Param((_NUMEL,)), Param((_NUMEL,), "bfloat16")),
    steps=(f"{DUST}/{_EXPONENTS[1]}/{_EXPONENTS_OF_HALF['bfloat16'][0]}",) * TRIALS,
    world_sizes=(2,),
    prerequisite="values",
)


def draw_dust(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the sizes of the dust, and the dtype of the second parameter."""
    exponent = numbers.randint(*_EXPONENTS)
    dtype = numbers.choice(list(_EXPONENTS_OF_HALF))
    of_half = numbers.randint(*_EXPONENTS_OF_HALF[dtype])
    return replace(
        scenario,
        params=(scenario.params[0], replace(scenario.params[1], dtype=dtype)),
        steps=(f"{DUST}/{exponent}/{of_half}",) * TRIALS,
    )
