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
    "the number of steps and the size of the one parameter, of bfloat16, are drawn",
    params=(Param((509,), "bfloat16"),),
    unrecorded_steps=200,
)

RESUMED_LATE = replace(
    SAVED_LATE,
    name="resumed_late",
    summary="new processes continue from the state that is saved late",
    prerequisite="saved_late",
    resume=replace(SAVED_LATE.resume, resumes=True),
)

# All steps from the save on feed the same gradients.
ROLLED_BACK_LATE = replace(
    SAVED_LATE,
    name="rolled_back_late",
    summary="a process loads the state of one of its first 45 steps 150 to 400 steps later, and "
    "repeats four steps; the numbers, and the size of the one parameter, of bfloat16, are drawn",
    steps=("crafted",) * 5 + ("constant",) * 154,
    unrecorded_steps=0,
    resume=replace(SAVED_LATE.resume, saves_at=5, rolls_back_at=155),
)

ALL = (SENT_LATE, SAVED_LATE, RESUMED_LATE, ROLLED_BACK_LATE)


def draw_late(scenario: Scenario, draws: random.Random) -> Scenario:
    """Draw the number of steps before those that are recorded."""
    return replace(scenario, unrecorded_steps=draws.randint(FEWEST, MOST))


def draw_saved_late(scenario: Scenario, _: random.Random) -> Scenario:
    """Draw the number of steps and the size, alike for both runs."""
    draws = random.Random(f"{scenario.session_seed}/saved late")
    params = (replace(scenario.params[0], shape=(draws.randint(257, 1019),)),)
    return replace(scenario, params=params, unrecorded_steps=draws.randint(200, 700))


def draw_rolled_back(scenario: Scenario, draws: random.Random) -> Scenario:
    """Draw the step of the state, the steps until it is loaded, and the size."""
    saves_at = draws.randint(5, 45)
    later = draws.randint(150, 400)
    return replace(
        scenario,
        params=(replace(scenario.params[0], shape=(draws.randint(257, 1019),)),),
        steps=("crafted",) * saves_at + ("constant",) * (later + 4),
        resume=replace(scenario.resume, saves_at=saves_at, rolls_back_at=saves_at + later),
    )


DRAWS = {
    SENT_LATE.name: draw_late,
    SAVED_LATE.name: draw_saved_late,
    RESUMED_LATE.name: draw_saved_late,
    ROLLED_BACK_LATE.name: draw_rolled_back,
}
