"""Parameters of a long run of an averager that have no gradient on any rank for many averages.

An expert of a mixture has its first token late, and a branch is not taken for some time. Their
values are the same on all ranks then, so that an averager may leave them out; in the first average
in which some rank has a gradient, they are averaged as all others. Averagers with a state may keep
none of such a parameter: under ``like`` no parameter rests. All numbers are drawn from the
session's seed.
"""

from dataclasses import replace
from functools import lru_cache

from conformance.scenarios.averaging_schedule import QUIET, Schedule
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

# The least and the largest number of averages of a rest.
AVERAGES = (17, 150)

_RESTS = "rests"


def let_rest(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Let a parameter have no gradient until a drawn average, and another one rest in between.

    Rests end within the first two thirds of the averages, since later ones show what an averager
    keeps. If there are too few averages, no parameter rests.
    """
    kinds = enumerate(scenario.steps)
    dues = [step for step, kind in kinds if kind != QUIET and schedule.is_due(step)]
    last = 2 * len(dues) // 3
    least, most = AVERAGES
    if last < least + 2:
        return scenario
    draw = generator(scenario, "rests")
    late, other = draw.sample(range(len(scenario.params)), 2)
    until = draw.randint(least, min(most, last))
    begin = draw.randint(1, last - least - 1)
    end = draw.randint(begin + least + 1, min(begin + most + 1, last))
    rests = f"{late}:0:{dues[until]} {other}:{dues[begin] + 1}:{dues[end]}"
    return replace(scenario, options=(*scenario.options, f"{_RESTS}={rests}"))


def rests(scenario: Scenario, step: int, index: int) -> bool:
    """Whether no rank has a gradient of a parameter at a step."""
    return step in _rests_of(scenario.options).get(index, ())


@lru_cache(maxsize=64)
def _rests_of(options: tuple[str, ...]) -> dict[int, range]:
    found = {}
    for option in options:
        name, _, text = option.partition("=")
        for rest in text.split() if name == _RESTS else ():
            index, begin, end = map(int, rest.split(":"))
            found[index] = range(begin, end)
    return found
