"""Steps after a thousand others: a short run cannot show these, and a long run records less."""

import random
from dataclasses import replace

from conformance.scenarios.hook import LIKE, ORDERED, SAVED_ONE
from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.scenarios.reused_states import ROLLED_BACK

FEWEST, MOST = 1000, 1200

SENT_LATE = replace(
    ORDERED,
    name="sent_late",
    summary="the scenario `ordered`, after 1,000 to 1,200 steps, a drawn number; those are "
    "recorded by their bytes alone",
    steps=("crafted",) * 12,
    # Two buckets, each with a matrix that is worth compressing: DDP closes one at 256 bytes.
    ddp=DDPOptions(bucket_cap_mb=256 / 2**20),
    unrecorded_steps=FEWEST,
)

LIKE_LATE = replace(
    LIKE,
    name="like_late",
    summary="random gradients after 1,000 to 1,200 steps that are not recorded, a drawn number",
    steps=("normal",) * 12,
    unrecorded_steps=FEWEST,
    unrecorded_kind="normal",
    prerequisite="like",
)

SAVED_LATE = replace(
    SAVED_ONE,
    name="saved_late",
    summary="the state is saved after 200 to 700 steps that are not recorded, and three others; "
    "the number of steps, and the size and dtype of the one parameter, float16 or bfloat16, are "
    "drawn",
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

# All steps from the save on feed the same gradients. DDP has rebuilt its buckets before the save:
# bits can be compared for buckets of several parameters, too. A hook may keep one flat tensor for
# such a bucket, and its parts elsewhere.
ROLLED_BACK_LATE = replace(
    ROLLED_BACK,
    name="rolled_back_late",
    summary="a process saves its state after 3 to 43 steps, takes 300 to 500 more, loads the "
    "state, and repeats the first 12 of these; 5 to 8 parameters, of the other one of float16 and "
    "bfloat16, in two buckets, with three or more in one, and one of float64; all of it is drawn",
    params=(
        *(Param((size,), "float16") for size in (509, 307, 401, 263, 601)),
        Param((311,), "float64"),
    ),
    ddp=DDPOptions(bucket_cap_mb=2081 / 2**20),
    groups=(),
    world_sizes=(2,),
)
REPEATED = 12

ALL = (SENT_LATE, LIKE_LATE, SAVED_LATE, RESUMED_LATE, ROLLED_BACK_LATE)


def draw_late(scenario: Scenario, draws: random.Random) -> Scenario:
    """Draw the number of steps before those that are recorded."""
    return replace(scenario, unrecorded_steps=draws.randint(FEWEST, MOST))


def _halves(scenario: Scenario) -> list[str]:
    """Return the dtype that new processes load, and the one that the same process loads."""
    draws = random.Random(f"{scenario.session_seed}/halves")
    return draws.sample(("float16", "bfloat16"), 2)


def draw_saved_late(scenario: Scenario, _: random.Random) -> Scenario:
    """Draw the number of steps and the size, alike for both runs."""
    draws = random.Random(f"{scenario.session_seed}/saved late")
    params = (Param((draws.randint(257, 1019),), _halves(scenario)[0]),)
    return replace(scenario, params=params, unrecorded_steps=draws.randint(200, 700))


def draw_rolled_back_late(scenario: Scenario, draws: random.Random) -> Scenario:
    """Draw the sizes, and the numbers of steps before the save and before the load.

    A bucket is closed at half of the bytes of one dtype. No parameter of five or more has as many:
    the first bucket has two or more, and leaves the others, one or more, to the second. The
    parameter of float64 has a bucket of its own.
    """
    saves_at, later = scenario.resume.saves_at, draws.randint(300, 500)
    sizes = [draws.randint(257, 1019) for _ in range(draws.randint(5, 8))]
    in_bytes = 2 * sum(sizes)
    halves = [Param((size,), _halves(scenario)[1]) for size in sizes]
    return replace(
        scenario,
        params=(*halves, Param((draws.randint(257, 1019),), "float64")),
        ddp=replace(scenario.ddp, bucket_cap_mb=in_bytes / 2 / 2**20),
        steps=scenario.steps[:saves_at] + ("constant",) * (later + REPEATED),
        unrecorded_steps=draws.randint(0, 40),
        resume=replace(scenario.resume, rolls_back_at=saves_at + later),
    )


DRAWS = {
    SENT_LATE.name: draw_late,
    LIKE_LATE.name: draw_late,
    SAVED_LATE.name: draw_saved_late,
    RESUMED_LATE.name: draw_saved_late,
    ROLLED_BACK_LATE.name: draw_rolled_back_late,
}
