"""Scenarios in which a state serves more than the ranks and the DDP that it was made for.

resumed_from_rank_0       as many ranks continue as have saved, all from the state of rank 0
resumed_by_other_ranks    three or four ranks continue from the state of rank 0 of two
rewrapped                 layers thaw, then others freeze: DDP is made anew each time, and the same
                          hook and state are registered on it
"""

import random
from dataclasses import replace

from conformance.scenarios.hook import RESUMED
from conformance.scenarios.model import Scenario

_OF_RANK_0 = replace(RESUMED.resume, of_rank_0=True)

RESUMED_FROM_RANK_0 = replace(
    RESUMED,
    name="resumed_from_rank_0",
    summary="all ranks continue from the state that rank 0 saved",
    resume=_OF_RANK_0,
)

RESUMED_BY_OTHER_RANKS = replace(
    RESUMED,
    name="resumed_by_other_ranks",
    summary="another number of ranks continues from the state that rank 0 saved; it is drawn",
    world_sizes=(),
    size=3,
    resume=_OF_RANK_0,
)

RESUMED_ELSEWHERE = (RESUMED_FROM_RANK_0, RESUMED_BY_OTHER_RANKS)

ALL = RESUMED_ELSEWHERE


def _draw_size(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw three or four ranks; two have saved."""
    return replace(scenario, size=numbers.choice((3, 4)))


DRAWS = {RESUMED_BY_OTHER_RANKS.name: _draw_size}
