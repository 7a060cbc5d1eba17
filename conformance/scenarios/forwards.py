"""Steps of a long run that have several forwards with gradients, as data.

A batch may be given up after its forward, because its loss is not finite. A step may have several
forwards before its only backward: of real and generated images, or of two views of one image. A
hook that takes each forward for a step may then take the same turn in every step. So stretches of
steps have the same number of forwards; they are drawn from the session's seed:

    first stretches  three, one in each quarter of the run after the warm-up but the last, of 80 to
                     120 steps, or half of the quarter if that is less; of two to four forwards
    last stretch     from a step in the first half of the last quarter to the end, so that what a
                     hook never sends is missing at last; of four or six forwards
    further forwards given up before the step's own forward, or added to its loss; what is added
                     has gradients of negative zeros, so that sums are exact
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from conformance.scenarios.feed import feed_of
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

STRETCH = (80, 120)


@dataclass(frozen=True)
class MoreForwards:
    """Further forwards of a step, on all ranks.

    Attributes:
        count: their number.
        is_given_up: their losses are thrown away; if false, they are added to the step's own.
    """

    count: int
    is_given_up: bool


@lru_cache(maxsize=16)
def more_forwards(scenario: Scenario) -> Mapping[int, MoreForwards]:
    """Return the further forwards of a long run, by the step that each belongs to."""
    draws = generator(scenario, "forwards")
    begin = scenario.long_run.warm_up
    steps = feed_of(scenario).steps
    quarter = (steps - begin) // 4
    made: dict[int, MoreForwards] = {}
    for number in range(3):
        length = min(draws.randint(*STRETCH), quarter // 2)
        first = begin + number * quarter + draws.randint(0, quarter - length)
        more = MoreForwards(draws.randint(1, 3), draws.random() < 0.5)
        made |= dict.fromkeys(range(first, first + length), more)
    first = begin + 3 * quarter + draws.randint(0, quarter // 2)
    more = MoreForwards(draws.choice((3, 5)), draws.random() < 0.5)
    return made | dict.fromkeys(range(first, steps), more)
