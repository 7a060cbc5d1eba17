"""Scenarios for wrappers of modules whose parts differ from their block (section 19, continued).

Networks compute in float64, in one process each: nothing averages gradients. These numbers are
drawn from the session's seed:

wrapper_parts  the options of each norm; for each step the mode of each block and of each part, the
               statistics of norms, the share of dropout, and the moment of an evaluation; the step
               in which the network itself is in eval mode
wrapper_idle   for each step the branch of each block
"""

from dataclasses import replace
from typing import NamedTuple

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.wrapper import PLAIN

BLOCKS = 3
NORMS = ("norm", "tail.1.0")
"""The norms of a block, by name: one of its layers, and one two rows of layers below it."""
WHOLE = ""
PARTS_OF_BLOCK = (
    WHOLE,
    "inner",
    "norm",
    "dropout",
    "tail",
    "tail.0",
    "tail.1",
    "tail.1.0",
    "tail.1.1",
    "tail.1.1.0",
    "tail.1.1.1",
)
"""The names of all modules of a block whose modes are drawn, the block itself and parents first."""


class NormOptions(NamedTuple):
    """Options of a norm.

    Attributes:
        momentum: the share of a batch in the running statistics; None averages all batches.
        eps: is added to the variance.
    """

    momentum: float | None
    eps: float


PARTS = replace(
    PLAIN,
    name="wrapper_parts",
    summary="blocks, and norms, dropouts and rows of layers at any depth inside them, have modes "
    "of their own, other ones in each step; norms have options of their own; some steps have an "
    "evaluation before them, or between forward and backward; the last three have no dropout",
    steps=("normal",) * 6,
    world_sizes=(2,),
    variant="training_parts",
)

# The moments of an evaluation in a step of ``PARTS``; the empty one stands for none.
_MOMENTS = ("", "before", "between")
# The number of the block, and the name of each norm.
_ALL_NORMS = [(block, norm) for block in range(BLOCKS) for norm in NORMS]
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
    """Return whether each block and each part trains in a step of ``PARTS``, by the number of the
    block and the part's name; parents come before their children.

    One norm at least trains, and one does not.
    """
    draw = generator(scenario, f"modes/{step}")
    modes = {
        (block, part): draw.random() < 0.5 for block in range(BLOCKS) for part in PARTS_OF_BLOCK
    }
    trains, frozen = draw.sample(_ALL_NORMS, 2)
    modes[trains] = True
    modes[frozen] = False
    return modes


def options_of_norms(scenario: Scenario) -> dict[tuple[int, str], NormOptions]:
    """Return the options of each norm of ``PARTS``, by the number of its block and its name.

    One or two of the six have a momentum of None, and the others one of 0.01 to 0.5. An ``eps`` is
    10**-6 to 10**-2.
    """
    draw = generator(scenario, "options")
    averaging = draw.sample(_ALL_NORMS, draw.randint(1, 2))
    return {
        norm: NormOptions(
            momentum=None if norm in averaging else draw.uniform(0.01, 0.5),
            eps=10 ** draw.uniform(-6, -2),
        )
        for norm in _ALL_NORMS
    }


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
