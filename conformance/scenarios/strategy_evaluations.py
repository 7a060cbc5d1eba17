"""Evaluations of the model in the long run of a sync strategy, as data.

A training script evaluates its model between two steps, and may have a forward without gradients
between two micro-batches, of a metric. A strategy sees neither, and must not mistake such a forward
for one of training. The steps are drawn from the session's seed: 4 to 20 steps lie between two
evaluations, and half of these come before the last micro-batch of a step, in either mode; the
others come before a step, in evaluation mode.

The main process of many scripts evaluates the module inside of DDP alone. So does a drawn rank in a
third of the evaluations that come before a step, and before two drawn steps of the runs with
buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy_training import BUFFERS, LONG

_STEPS_APART = (4, 20)


@dataclass(frozen=True)
class Evaluation:
    """Forwards without gradients, on all ranks or on one.

    Attributes:
        within_step: they come before the last micro-batch, and not before the step.
        changes_mode: eval() comes before them, and train() after them.
        forwards: their number.
        rank: the rank of a group that has them, as a share of its size, below 1; it evaluates the
            module inside of DDP. None if all ranks evaluate DDP.
    """

    within_step: bool
    changes_mode: bool
    forwards: int
    rank: float | None = None

    @property
    def is_of_one_rank(self) -> bool:
        """Whether one rank alone evaluates."""
        return self.rank is not None

    def is_on(self, place: int, size: int) -> bool:
        """Whether a rank evaluates.

        Args:
            place: the rank's number within its group.
            size: the size of the group.
        """
        return self.rank is None or int(self.rank * size) == place


@lru_cache(maxsize=16)
def evaluations(scenario: Scenario) -> Mapping[int, Evaluation]:
    """Return the evaluations of a run by the step that each belongs to; long runs have some, and
    those with buffers.
    """
    of_one_rank = generator(scenario, "evaluations of one rank")
    if scenario.variant == BUFFERS.variant:
        # The strategy has had a step before.
        steps = of_one_rank.sample(range(1, len(scenario.steps)), 2)
        return {step: Evaluation(False, True, 1, of_one_rank.random()) for step in steps}
    if scenario.variant != LONG.variant:
        return {}
    draws = generator(scenario, "evaluations")
    made = {}
    step = draws.randint(*_STEPS_APART)
    while step < len(scenario.steps):
        within_step = draws.random() < 0.5
        changes_mode = not within_step or draws.random() < 0.5
        is_of_one = not within_step and of_one_rank.random() < 1 / 3
        rank = of_one_rank.random() if is_of_one else None
        made[step] = Evaluation(within_step, changes_mode, draws.randint(1, 3), rank)
        step += draws.randint(*_STEPS_APART)
    return made
