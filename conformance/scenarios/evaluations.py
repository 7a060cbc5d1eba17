"""Evaluations of the model in a long run, and values that are loaded into it, as data.

A training script evaluates its model between two steps, and may have forwards without gradients
within a step: of a teacher, or for a metric. It may load the best weights so far, or those of a
moving average. A hook must not mistake such a forward for one of training, nor forget its state,
nor go on from parameters of its own. The steps are drawn from the session's seed:

    evaluations     5 to 40 steps apart; half of them before a step, in evaluation mode, and half
                    between the forward and the backward of a step, in either mode; under no_grad
                    or inference_mode; half of them on all ranks, the others on rank 0 or 1 alone
    loaded values   for hooks that step the parameters: 40 to 250 rounds apart, before the first
                    step of a round; the values after a drawn earlier round, on all ranks
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from conformance.scenarios.feed import feed_of
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

NO_GRAD = "no_grad"
INFERENCE = "inference_mode"
STEPS_APART = (5, 40)
ROUNDS_APART = (40, 250)


@dataclass(frozen=True)
class Evaluation:
    """Forwards without gradients.

    Attributes:
        within_step: they come between the step's forward and its backward; if false, before it.
        context: the function of torch that turns gradients off.
        changes_mode: eval() comes before them, and train() after them.
        rank: the rank in the group that makes them; None for all ranks. One rank alone calls the
            module, and all ranks together the module under DDP.
        forwards: their number.
    """

    within_step: bool
    context: str
    changes_mode: bool
    rank: int | None
    forwards: int


@lru_cache(maxsize=16)
def evaluations(scenario: Scenario) -> Mapping[int, Evaluation]:
    """Return the evaluations of a long run, by the step that each belongs to."""
    draws = generator(scenario, "evaluations")
    made = {}
    step = draws.randint(*STEPS_APART)
    while step < feed_of(scenario).steps:
        within_step = draws.random() < 0.5
        made[step] = Evaluation(
            within_step,
            draws.choice((NO_GRAD, INFERENCE)),
            not within_step or draws.random() < 0.5,
            draws.choice((None, None, 0, 1)),
            draws.randint(1, 3),
        )
        step += draws.randint(*STEPS_APART)
    return made


@lru_cache(maxsize=16)
def loaded_rounds(scenario: Scenario) -> Mapping[int, int]:
    """Return the rounds before which values are loaded, and the rounds that left these values."""
    draws = generator(scenario, "loaded values")
    made = {}
    number = draws.randint(*ROUNDS_APART)
    while number < feed_of(scenario).rounds:
        made[number] = draws.randrange(number - 1)
        number += draws.randint(*ROUNDS_APART)
    return made
