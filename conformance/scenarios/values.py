"""Scenarios of values as in training: layers of different scales, heavy tails, outliers.

``layers``: each parameter has a bucket of its own after the first step, in which all of them share
one; that step feeds zeros. The number of a parameter decides the pattern of its gradients
(``gradients.PATTERNS``), its exponent their scale.

``ranges``: the exponents lie near the ends of the range of each dtype. From step to step each
bucket goes on to another end, so that a scale from an earlier step is too small or too large.

``middle_sizes``: ordinary values, for sizes between those of the other small models.
"""

import random
from dataclasses import replace

from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.scenarios.training_sizes import sizes_between

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

_MIDDLE = (28, 20_000)
_MIDDLE_COUNT = 8

MIDDLE_SIZES = replace(
    LAYERS,
    name="middle_sizes",
    summary=f"buckets of {_MIDDLE[0]} to {_MIDDLE[1]:,} elements, {_MIDDLE_COUNT} of which are "
    "drawn; the same gradients in every step",
    params=(Param((_MIDDLE[0],)),) * _MIDDLE_COUNT,
    steps=("crafted",) * 4,
    world_sizes=(2,),
)

# For each dtype, ranges of exponents that a narrower dtype does not have, or in which the square of
# a gradient is 0 or infinite. Crafted values are at most 168 * 2**exponent at three ranks, and
# their sums three times as large; the smallest is 2**(exponent - 3). So float16 holds all of them,
# the smallest as subnormals.
_OF_DTYPES = {
    "float16": ((6, 7), (-13, -10), (-21, -19)),
    "bfloat16": ((100, 115), (20, 40), (-45, -35), (-110, -100)),
    "float64": ((200, 900), (-900, -200)),
}
_LENGTHS_OF_DTYPES = (17, 60)

RANGES = Scenario(
    name="ranges",
    summary="float16, bfloat16 and float64 parameters in buckets of their own, each with gradients "
    "at another end of the dtype's range, and in each step at another one",
    params=tuple(Param((31,), dtype) for dtype, ranges in _OF_DTYPES.items() for _ in ranges),
    steps=("crafted", "crafted", "normal", "crafted", "normal"),
    world_sizes=(2, 3),
    ddp=DDPOptions(bucket_cap_mb=16 / 2**20),
    prerequisite="buckets",
)

VALUES_IN_TRAINING = (LAYERS, ALIKE, MIDDLE_SIZES, RANGES)


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


def draw_ranges(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the sizes, 17 to 60 elements, the order, and each exponent in a range of its dtype.

    The ranges are, as powers of two, for float16: 6 to 7, -13 to -10, -21 to -19; for bfloat16: 100
    to 115, 20 to 40, -45 to -35, -110 to -100; for float64: 200 to 900, -900 to -200. From step to
    step each parameter goes on to the next range of its dtype, or to the one before. The direction
    is drawn for each dtype. So each step has gradients in all ranges.
    """
    params = []
    for dtype, ranges in _OF_DTYPES.items():
        direction = draw.choice((1, -1))
        for first in range(len(ranges)):
            places = _places(first, direction, len(ranges), len(scenario.steps))
            exponents = tuple(draw.randint(*ranges[place]) for place in places)
            size = draw.randint(*_LENGTHS_OF_DTYPES)
            params.append(Param((size,), dtype, exponents=exponents))
    draw.shuffle(params)
    return replace(scenario, params=tuple(params))


def within_range(scenario: Scenario, dtype: str) -> Scenario:
    """Return the scenario ``ranges`` with values that a half dtype holds, whatever their own."""
    ranges = _OF_DTYPES[dtype]
    narrower = ("float16",) if dtype == "bfloat16" else ()
    params = []
    for number, spec in enumerate(scenario.params):
        if spec.dtype not in narrower:
            places = _places(number, 1, len(ranges), len(scenario.steps))
            spec = replace(spec, exponents=tuple(ranges[place][0] for place in places))
        params.append(spec)
    return replace(scenario, params=tuple(params))


def _places(first: int, direction: int, count: int, steps: int) -> list[int]:
    """Return the number of the range for each step."""
    return [(first + direction * step) % count for step in range(steps)]


def draw_middle_sizes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the sizes, one from each of eight equal parts of the range of logarithms."""
    sizes = sizes_between(*_MIDDLE, _MIDDLE_COUNT, _MIDDLE_COUNT, numbers)
    numbers.shuffle(sizes)
    return replace(scenario, params=tuple(Param((size,)) for size in sizes))
