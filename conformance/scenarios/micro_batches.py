"""The number of micro-batches of a step, and their weights."""

import random
from dataclasses import replace

from conformance.scenarios.hook import ACCUMULATED
from conformance.scenarios.model import Scenario

_MOST = 5
_LARGEST_WEIGHT = 3  # and of the sum of the first ones: half precision holds all sums exactly


def with_micro_batches(scenario: Scenario, count: int, numbers: random.Random) -> Scenario:
    """Return a scenario of ``count`` micro-batches, with drawn weights from -3 to 3."""
    choices = [w for w in range(-_LARGEST_WEIGHT, _LARGEST_WEIGHT + 1) if w]
    weights: list[int] = []
    for left in range(count - 1, 0, -1):
        total = sum(weights)
        fitting = [w for w in choices if abs(total + w) <= _LARGEST_WEIGHT]
        if left == 1:
            fitting = [w for w in fitting if 1 - total - w in choices]
        weights.append(numbers.choice(fitting))
    return replace(scenario, microbatch_weights=(*weights, 1 - sum(weights)))


def _draw_micro_batches(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw two to five micro-batches."""
    return with_micro_batches(scenario, numbers.randint(2, _MOST), numbers)


DRAWS = {ACCUMULATED.name: _draw_micro_batches}
