"""Steps after a thousand others: a short run cannot show these, and a long run records less."""

import random
from dataclasses import replace

from conformance.scenarios.hook import ORDERED
from conformance.scenarios.model import Scenario

FEWEST, MOST = 1000, 1200

SENT_LATE = replace(
    ORDERED,
    name="sent_late",
    summary="the scenario `ordered`, after 1,000 to 1,200 steps that are not recorded; their "
    "number is drawn",
    steps=("crafted",) * 12,
    unrecorded_steps=FEWEST,
)

ALL = (SENT_LATE,)


def draw_late(scenario: Scenario, draws: random.Random) -> Scenario:
    """Draw the number of steps before those that are recorded."""
    return replace(scenario, unrecorded_steps=draws.randint(FEWEST, MOST))


DRAWS = {SENT_LATE.name: draw_late}
