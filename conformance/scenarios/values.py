"""The scenario of values as in training: layers of different scales, heavy tails, outliers.

Each parameter has a bucket of its own after the first step, in which all of them share one; that
step feeds zeros. Its number decides the pattern of its gradients (``gradients.PATTERNS``), its
exponent their scale.
"""

import random
from dataclasses import replace

from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import DDPOptions, Param, Scenario

# The scales, as powers of two. Gradients of 2**-25 and 2**-24 are those of a large model without a
# loss scale, those of 2**12 to 2**17 have one. From the smallest to the largest it is 2**36 or
# more; an optimizer's epsilon of 1e-8 is about 2**-27.
SMALLEST = (-25, -24)
LARGEST = (12, 17)
BETWEEN = (-6, 6)
_RANGES = (SMALLEST, LARGEST, BETWEEN, SMALLEST, LARGEST)
# The range of the second parameter of a pattern, by that of the first one.
_OTHER = {SMALLEST: LARGEST, LARGEST: SMALLEST, BETWEEN: SMALLEST}
# Twice the number of patterns: each is fed to a matrix and to a vector.
_COUNT = 2 * len(_RANGES)
SIDES = (20, 36)  # of a matrix
LENGTHS = (257, 420)  # of a vector

LAYERS = Scenario(
    name="layers",
    summary="layers whose scales differ by 2**36 and more, in buckets of their own: heavy tails, "
    "outliers, ties, sparse rows",
    params=(Param((24, 32)), Param((300,))) * (_COUNT // 2),
    steps=("zero_all", *("training",) * 4),
    world_sizes=(2, 3),
    ddp=DDPOptions(bucket_cap_mb=64 / 2**20),
    prerequisite="buckets",
)

ALIKE = replace(
    VALUES,
    name="alike",
    summary="all ranks feed the same random gradients, in every step",
    steps=("alike",) * 48,
    world_sizes=(2, 4),
)

VALUES_IN_TRAINING = (LAYERS, ALIKE)


def draw_layers(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw sizes in ``SIDES`` and ``LENGTHS``, and the scale of each parameter in its range.

    Each pattern gets two different ranges of scales.
    """
    ranges = list(_RANGES)
    draw.shuffle(ranges)
    ranges += [_OTHER[range_] for range_ in ranges]
    params = []
    for number, (low, high) in enumerate(ranges):
        shape = (
            (draw.randint(*SIDES), draw.randint(*SIDES))
            if number % 2 == 0
            else (draw.randint(*LENGTHS),)
        )
        params.append(Param(shape, exponent=draw.randint(low, high)))
    return replace(scenario, params=tuple(params))
