"""Parameters of a long run of an averager that have no gradient on any rank for many averages.

An expert of a mixture has its first token late, and a branch is not taken for some time. Their
values are the same on all ranks then, so that an averager may leave them out; in the first average
in which some rank has a gradient, they are averaged as all others. A rest ends on one rank a few
averages before it ends on the others. Averagers with a state may keep none of such a parameter:
under ``like`` no parameter rests if the reference remembers averages. All numbers are drawn from
the session's seed.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from conformance.scenarios.averaging_schedule import QUIET, Schedule
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

# The least and the largest number of averages of a rest.
AVERAGES = (17, 150)
# The least and the largest number of averages between the end of a rest on one rank and on others.
_ALONE = (1, 4)
_PLACES = 8

_RESTS = "rests"


def let_rest(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Let a parameter have no gradient until a drawn average, and another one rest in between.

    Each rest ends on a drawn rank 1 to 4 averages before it ends on the others; those are two
    ranks, since one alone may be the one that an averager trusts. Rests end within the first two
    thirds of the averages, since later ones show what an averager keeps. If there are too few
    averages, no parameter rests.
    """
    kinds = enumerate(scenario.steps)
    dues = [step for step, kind in kinds if kind != QUIET and schedule.is_due(step)]
    last = 2 * len(dues) // 3
    least, most = AVERAGES
    if last < least + 3:
        return scenario
    draw = generator(scenario, "rests")
    late, other = draw.sample(range(len(scenario.params)), 2)
    until = draw.randint(least, min(most, last - 1))
    begin = draw.randint(1, last - least - 2)
    end = draw.randint(begin + least + 1, min(begin + most + 1, last - 1))
    alone = [draw.randint(*_ALONE) for _ in range(2)]
    place = draw.randrange(_PLACES)
    rests = (
        f"{late}:0:{dues[until]}:{dues[min(until + alone[0], last)]}:{place} "
        f"{other}:{dues[begin] + 1}:{dues[end]}:{dues[min(end + alone[1], last)]}:{place + 1}"
    )
    return replace(scenario, options=(*scenario.options, f"{_RESTS}={rests}"))


def rests(scenario: Scenario, size: int, place: int, step: int, index: int) -> bool:
    """Whether the rank in a place of its group has no gradient of a parameter that rests."""
    rest = _rests_of(scenario.options).get(index)
    if rest is None or step < rest.begin:
        return False
    return step < (rest.end if place == rest.first % size else rest.end_on_others)


@dataclass(frozen=True)
class _Rest:
    """The rest of a parameter.

    Attributes:
        begin: the first step of it.
        end: the step in which it has ended on one rank.
        end_on_others: the step in which it has ended on all ranks.
        first: the place of that one rank in its group, modulo the group's size.
    """

    begin: int
    end: int
    end_on_others: int
    first: int


@lru_cache(maxsize=64)
def _rests_of(options: tuple[str, ...]) -> dict[int, _Rest]:
    found = {}
    for option in options:
        name, _, text = option.partition("=")
        for rest in text.split() if name == _RESTS else ():
            index, *numbers = map(int, rest.split(":"))
            found[index] = _Rest(*numbers)
    return found
