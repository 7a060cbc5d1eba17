"""Scenarios for wrappers of modules whose parts differ from their block (section 19, continued).

Networks compute in float64, in one process each: nothing averages gradients. These numbers are
drawn from the session's seed:

wrapper_parts  for each step the mode of each part, the statistics of norms, the share of dropout,
               and the moment of an evaluation; the step in which the network itself is in eval mode
wrapper_idle   for each step the branch of each block
"""

from dataclasses import replace

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.wrapper import PLAIN

BLOCKS = 3
NORM = "norm"
PARTS_OF_BLOCK = (NORM, "dropout", "tail")
"""The attributes of a block whose modes are drawn: layers, and a row of layers."""

PARTS = replace(
    PLAIN,
    name="wrapper_parts",
    summary="norms, dropouts and rows of layers inside the blocks have modes of their own, other "
    "ones in each step; some steps have an evaluation before them, or between forward and "
    "backward; the last three have no dropout",
    steps=("normal",) * 6,
    world_sizes=(2,),
    variant="training_parts",
)

# The moments of an evaluation in a step of ``PARTS``; the empty one stands for none.
_MOMENTS = ("", "before", "between")
# The first of the steps without dropout.
_LAST_STEPS = 3


def share_in_parts(scenario: Scenario, step: int) -> float:
    """Return the share of dropout in a step of ``PARTS``: 0.1 to 0.5, and later 0."""
    if step >= _LAST_STEPS:
        return 0.0
    return generator(scenario, f"share/{step}").uniform(0.1, 0.5)


def network_trains(scenario: Scenario, step: int) -> bool:
    """Whether the network is in training mode in a step of ``PARTS``; in one it is not."""
    return step != generator(scenario, "eval").randrange(len(scenario.steps))


def modes_of_parts(scenario: Scenario, step: int) -> dict[tuple[int, str], bool]:
    """Return whether each part trains in a step of ``PARTS``, by the number of its block and by
    name.

    One norm at least trains, and one does not.
    """
    draw = generator(scenario, f"modes/{step}")
    modes = {
        (block, part): draw.random() < 0.5 for block in range(BLOCKS) for part in PARTS_OF_BLOCK
    }
    trains, frozen = draw.sample(range(BLOCKS), 2)
    modes[trains, NORM] = True
    modes[frozen, NORM] = False
    return modes


def moment_of_evaluation(scenario: Scenario, step: int) -> str:
    """Return whether a step of ``PARTS`` has an evaluation before it, or between its passes.

    Each of these comes in the steps with dropout, and in those without it.
    """
    draw = generator(scenario, f"evaluations/{step // len(_MOMENTS)}")
    return draw.sample(_MOMENTS, len(_MOMENTS))[step % len(_MOMENTS)]


BRANCHES = 3
WAYS_OF_CHOOSING = ("argument", "keyword", "attribute")
"""How a block with branches gets the number of its branch."""

IDLE = replace(
    PLAIN,
    name="wrapper_idle",
    summary="each step uses one of several branches of a block; some steps skip a layer, or a "
    "head, of another block",
    steps=("normal",) * 6,
    world_sizes=(2,),
    variant="training_idle",
)

SCENARIOS = (PARTS, IDLE)


def chosen_branches(scenario: Scenario, step: int) -> dict[str, int]:
    """Return the branch of each block in a step of ``IDLE``, by the way in which it is chosen.

    Each branch is used in two steps, and idle in the others.
    """
    return {
        way: generator(scenario, f"branches/{way}/{step // BRANCHES}").sample(
            range(BRANCHES), BRANCHES
        )[step % BRANCHES]
        for way in WAYS_OF_CHOOSING
    }


def is_skipped(scenario: Scenario, part: str, step: int) -> bool:
    """Whether a step of ``IDLE`` skips a part of a block, as half of the steps do."""
    count = len(scenario.steps)
    return step in generator(scenario, f"skipped/{part}").sample(range(count), count // 2)
