"""Steps of a long run that have several forwards with gradients, or checkpoints, as data.

A batch may be given up after its forward, because its loss is not finite. A step may have several
forwards before its only backward: of real and generated images, or of two views of one image. A
hook that takes each forward for a step may then take the same turn in every step. So stretches of
steps have the same number of forwards; they are drawn from the session's seed:

    first stretches  three, one in each quarter of the run after the warm-up but the last, of 80 to
                     120 steps, or half of the quarter if that is less: two of them of two to four
                     forwards, and one, a drawn one, of one forward with two to four checkpoints
    last stretch     from a step in the first half of the last quarter to the end, so that what a
                     hook never sends is missing at last; of six forwards, each with two checkpoints
                     if the others are given up: a hook that takes two, three, four or six turns
                     leaves out some turns then
    single steps     one to six beside these stretches, one of them early: a rank gives up one
                     to three forwards alone, as of a batch whose loss is not finite, so that ranks
                     have made different numbers of forwards from then on
    further forwards given up before the step's own forward, or added to its loss; what is added
                     has gradients of negative zeros, so that sums are exact
    checkpoints      torch.utils.checkpoint with use_reentrant=True, whose backward is a graph task
                     within that of the step; each has a part of the parameters
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from conformance.scenarios.feed import feed_of
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

STRETCH = (80, 120)
FORWARDS_AT_LAST = 6
_SINGLE_STEPS = (2, 6)
_RANKS = 2


@dataclass(frozen=True)
class Forwards:
    """The forwards of a step.

    Attributes:
        more: the number of forwards beside the step's own.
        is_given_up: their losses are thrown away; if false, they are added to the step's own.
        checkpoints: the number of reentrant checkpoints in each forward.
        rank: the one rank that makes more forwards, which are given up; None for all ranks.
    """

    more: int = 0
    is_given_up: bool = False
    checkpoints: int = 0
    rank: int | None = None


@lru_cache(maxsize=16)
def forwards_of(scenario: Scenario) -> Mapping[int, Forwards]:
    """Return the forwards of a long run, by the step; other steps have one, without checkpoints."""
    draws = generator(scenario, "forwards")
    begin = scenario.long_run.warm_up
    steps = feed_of(scenario).steps
    quarter = (steps - begin) // 4
    with_checkpoints = draws.randrange(3)
    made: dict[int, Forwards] = {}
    for number in range(3):
        length = min(draws.randint(*STRETCH), quarter // 2)
        first = begin + number * quarter + draws.randint(0, quarter - length)
        forwards = Forwards(draws.randint(1, 3), draws.random() < 0.5)
        if number == with_checkpoints:
            forwards = Forwards(checkpoints=draws.randint(2, 4))
        made |= dict.fromkeys(range(first, first + length), forwards)
    others = [step for step in range(begin + 2, begin + 3 * quarter) if step not in made]
    made |= _on_one_rank(scenario, others)
    first = begin + 3 * quarter + draws.randint(0, quarter // 2)
    is_given_up = draws.random() < 0.5
    # DDP takes no parameter that two checkpoints of a backward use.
    last = Forwards(FORWARDS_AT_LAST - 1, is_given_up, checkpoints=2 * is_given_up)
    return made | dict.fromkeys(range(first, steps), last)


def _on_one_rank(scenario: Scenario, places: list[int]) -> dict[int, Forwards]:
    """Return the steps in which one rank alone gives up forwards, drawn from ``places``."""
    draws = generator(scenario, "forwards of one rank")
    count = draws.randint(*_SINGLE_STEPS)
    first = draws.choice(places[: len(places) // 3])
    steps = {first, *draws.sample(places, count - 1)}
    return {
        step: Forwards(draws.randint(1, 3), is_given_up=True, rank=draws.randrange(_RANKS))
        for step in sorted(steps)
    }
