"""Scenarios for hooks of several collectives a step: one after the first raises.

In a run of its own, the last collective of a step raises, or one between the first and the last. If
a step has two collectives, the second raises in both; if it has one, that one does. These numbers
are drawn from the session's seed:

between_raises  the collective
large_last_raises, large_between_raises
                one parameter of 2**12 to 2**22 elements; the step, from 1 to 5; the collective
late_raises     the step, from 4 to 255; the last collective, or one between, each as likely

A step with fewer collectives than the steps before does not fail, and the next one is tried.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.evidence import (
    COLLECTIVE_RAISES_LARGE,
    COLLECTIVE_RAISES_LATE,
    draw_failure,
    draw_late_failure,
)
from conformance.scenarios.hook import COLLECTIVE_RAISES
from conformance.scenarios.model import Scenario

# More than the number of steps that are remembered (``instruments/raising_collective.py``): a hook
# that issues more collectives in its first step has other steps in memory at the end.
ATTEMPTS = 30

_LAST = -1
_BETWEEN = 1
_MANY = 2**16


def _later(scenario: Scenario, name: str, succeeding: int, summary: str) -> Scenario:
    """Return a scenario in which a later collective raises than in the given one."""
    return replace(
        scenario,
        name=name,
        summary=summary,
        steps=scenario.steps + scenario.steps[-1:] * (ATTEMPTS - 1),
        fault=replace(scenario.fault, succeeding=succeeding, attempts=ATTEMPTS),
        prerequisite=COLLECTIVE_RAISES.name,
    )


LAST_RAISES = _later(
    COLLECTIVE_RAISES,
    "last_raises",
    _LAST,
    "from step 2 on, the last collective of a step raises on rank 1",
)
BETWEEN_RAISES = _later(
    COLLECTIVE_RAISES,
    "between_raises",
    _BETWEEN,
    "from step 2 on, a drawn collective between the first and the last of a step raises on rank 1",
)
LARGE_LAST_RAISES = _later(
    COLLECTIVE_RAISES_LARGE,
    "large_last_raises",
    _LAST,
    "from a drawn step on, the last collective of a step raises on rank 1; one bucket of a drawn "
    "size",
)
LARGE_BETWEEN_RAISES = _later(
    COLLECTIVE_RAISES_LARGE,
    "large_between_raises",
    _BETWEEN,
    "the scenario `large_last_raises` with a drawn collective between the first and the last",
)
LATE_RAISES = _later(
    COLLECTIVE_RAISES_LATE,
    "late_raises",
    _LAST,
    "from a drawn step on, up to the 256th, a later collective than the first raises on rank 1",
)
SCENARIOS = (LAST_RAISES, BETWEEN_RAISES, LARGE_LAST_RAISES, LARGE_BETWEEN_RAISES, LATE_RAISES)


def _draw_between(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the collective."""
    return replace(scenario, fault=replace(scenario.fault, succeeding=draw.randint(1, _MANY)))


def _draw_large_between(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the collective too."""
    return _draw_between(draw_failure(scenario, draw), draw)


def _draw_late(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the step, and the collective: the last one, or one between."""
    scenario = draw_late_failure(scenario, draw)
    return scenario if draw.random() < 0.5 else _draw_between(scenario, draw)


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    BETWEEN_RAISES.name: _draw_between,
    LARGE_LAST_RAISES.name: draw_failure,
    LARGE_BETWEEN_RAISES.name: _draw_large_between,
    LATE_RAISES.name: _draw_late,
}
