"""Steps after a thousand others: a short run cannot show these, and a long run records less."""

import random
from dataclasses import replace

from conformance.scenarios.hook import ORDERED, SAVED_ONE
from conformance.scenarios.model import Param, Scenario

FEWEST, MOST = 1000, 1200

SENT_LATE = replace(
    ORDERED,
    name="sent_late",
    summary="the scenario `ordered`, after 1,000 to 1,200 steps that are not recorded; their "
    "number is drawn",
    steps=("crafted",) * 12,
    unrecorded_steps=FEWEST,
)

SAVED_LATE = replace(
    SAVED_ONE,
    name="saved_late",
    summary="the state is saved after 200 to 700 steps that are not recorded, and three others; "
    "the number of steps and the size of the one parameter are drawn",
    params=(Param((509,)),),
    unrecorded_steps=200,
)

RESUMED_LATE = replace(
    SAVED_LATE,
    name="resumed_late",
    summary="new processes continue from the state that is saved late",
    prerequisite="saved_late",
    resume=replace(SAVED_LATE.resume, resumes=True),
)

ALL = (SENT_LATE, SAVED_LATE, RESUMED_LATE)


def draw_late(scenario: Scenario, draws: random.Random) -> Scenario:
    """Draw the number of steps before those that are recorded."""
    return replace(scenario, unrecorded_steps=draws.randint(FEWEST, MOST))


def draw_saved_late(scenario: Scenario, _: random.Random) -> Scenario:
    """Draw the number of steps and the size, alike for both runs."""
    draws = random.Random(f"{scenario.session_seed}/saved late")
    params = (Param((draws.randint(257, 1019),)),)
    return replace(scenario, params=params, unrecorded_steps=draws.randint(200, 700))


DRAWS = {
    SENT_LATE.name: draw_late,
    SAVED_LATE.name: draw_saved_late,
    RESUMED_LATE.name: draw_saved_late,
}
