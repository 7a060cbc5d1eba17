"""The buffers of a model under a strategy or a join, and their values after each forward.

Each forward adds a drawn number to the buffers of integers, as a count of samples is, and to sums,
turns the complex ones by a right angle, and rotates the mask of bools and changes some of its bits.
The numbers differ on ranks, so that the buffers of the ranks do, too, until they are sent. No
narrower dtype holds the values: integers of int64 have more bits than a float64 holds, sums in
float64 more than a float32, and a level in bfloat16 is beyond the range of float16. A value is a
number here; the element i of a mask is its bit i.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.scenarios.model import Scenario
from conformance.scenarios.strategy_schedule import statistic

# The bits of the mask.
BITS = 16
# Ten numbers of these sizes are less than 2**63 and 2**31, and their sums are exact in float64.
_LARGEST = {"int64": 2**59, "int32": 2**27, "float64": 2**48, "float16": 2**11}
# The unit of a level in bfloat16, of which it has up to 255.
LEVEL = 2.0**40


@dataclass(frozen=True)
class Update:
    """The numbers that a forward changes the buffers with.

    Attributes:
        statistic: the running statistics move half of the way to it.
        number: each buffer of integers, and each sum, adds as much as its dtype holds.
    """

    statistic: float
    number: int

    def added(self, dtype: str) -> int:
        """Return the number that a buffer of a dtype adds; it is odd if the dtype is float64."""
        return self.number % _LARGEST.get(dtype, 256) | (dtype == "float64")

    @property
    def mask(self) -> int:
        """The bits of the mask that change."""
        return self.number % 2**BITS


def update_of(scenario: Scenario, place: int, step: int, batch: int) -> Update:
    """Return the numbers of one forward.

    Args:
        place: the rank's number within its group.
        step: the step.
        batch: the micro-batch of the step.
    """
    draw = random.Random(f"{scenario.session_seed}/buffers/{place}/{step}/{batch}")
    return Update(statistic(place, step, batch), draw.randrange(2**58, 2**59))


def update_in_join(scenario: Scenario, place: int) -> Update:
    """Return the numbers of each forward of a rank that trains in a join context.

    Args:
        place: the rank's number within its group.
    """
    return update_of(scenario, place, 0, 0)


def _running(value: float, update: Update) -> float:
    # A few bits are added in each forward, so that float32 is exact.
    return value + 0.5 * (update.statistic - value)


def _seen(value: float, update: Update) -> float:
    return value + update.added("int64")


def _samples(value: float, update: Update) -> float:
    return value + update.added("int32")


def _wrapped(value: float, update: Update) -> float:
    return (value + update.added("uint8")) % 256


def _phase(value: complex, update: Update) -> complex:
    # Exact, as running statistics are.
    return value * 1j + update.statistic


def _total(value: float, update: Update) -> float:
    return value + update.added("float64")


def _share(value: float, update: Update) -> float:
    return (value + update.added("float16")) % 2**11


def _level(value: float, update: Update) -> float:
    return (value / LEVEL + update.added("bfloat16")) % 256 * LEVEL


def _angle(value: complex, update: Update) -> complex:
    return value * 1j + update.added("float64")


def _mask(value: Any, update: Update) -> Any:
    bits = int(value)
    return ((bits << 1 | bits >> (BITS - 1)) % 2**BITS) ^ update.mask


# The value of a buffer after a forward, by the name of the buffer.
UPDATED: Mapping[str, Callable[[Any, Update], Any]] = {
    "running": _running,
    "seen": _seen,
    "samples": _samples,
    "wrapped": _wrapped,
    "mask": _mask,
    "phase": _phase,
    "total": _total,
    "share": _share,
    "level": _level,
    "angle": _angle,
}
