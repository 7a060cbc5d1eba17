"""Evaluations of the model in the long run of a sync strategy, as data.

A training script evaluates its model between two steps, and may have a forward without gradients
between two micro-batches, of a metric. A strategy sees neither, and must not mistake such a forward
for one of training. The steps are drawn from the session's seed: 4 to 20 steps lie between two
evaluations, and half of these come before the last micro-batch of a step, in either mode; the
others come before a step, in evaluation mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy_training import LONG

_STEPS_APART = (4, 20)


@dataclass(frozen=True)
class Evaluation:
    """Forwards without gradients, on all ranks.

    Attributes:
        within_step: they come before the last micro-batch, and not before the step.
        changes_mode: eval() comes before them, and train() after them.
        forwards: their number.
    """

    within_step: bool
    changes_mode: bool
    forwards: int


@lru_cache(maxsize=16)
def evaluations(scenario: Scenario) -> Mapping[int, Evaluation]:
    """Return the evaluations of a run by the step that each belongs to; only long runs have any."""
    if scenario.variant != LONG.variant:
        return {}
    draws = generator(scenario, "evaluations")
    made = {}
    step = draws.randint(*_STEPS_APART)
    while step < len(scenario.steps):
        within_step = draws.random() < 0.5
        changes_mode = not within_step or draws.random() < 0.5
        made[step] = Evaluation(within_step, changes_mode, draws.randint(1, 3))
        step += draws.randint(*_STEPS_APART)
    return made
