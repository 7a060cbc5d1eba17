"""The code that clears gradients before the backward of an optimizer wrapper: the trainer's, or
``zero_grad()`` of the wrapper.

If parameters are frozen, thawed or added between steps, ``zero_grad()`` has to clear those that
are in a group now, whether they require a gradient or not (torch documentation,
``torch.optim.Optimizer.zero_grad``). A gradient that it leaves is stepped once more, or added to
the next one. All is drawn from the session's seed.
"""

from enum import Enum

from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import GROUPS
from conformance.scenarios.optimizer_in_half import HALF
from conformance.scenarios.optimizer_rests import rests
from conformance.scenarios.optimizer_training import ADAM_OPTIONS, EMPTY, OPTIONS
from conformance.scenarios.seeds import generator


class Clearing(Enum):
    """The way in which the gradients of a step are cleared, before the backward of the next one."""

    BY_TRAINER = "p.grad = None"
    FIRST = "zero_grad() right before the backward, or first in a closure"
    LAST = "zero_grad() after the step"


# Half of the steps have zero_grad() in front of them, and a quarter behind the step before.
_WAYS = (Clearing.BY_TRAINER, Clearing.FIRST, Clearing.FIRST, Clearing.LAST)
_BY_OPTIMIZER = (Clearing.FIRST, Clearing.LAST)
_VARIANTS = (GROUPS.variant, OPTIONS.variant, ADAM_OPTIONS.variant, EMPTY.variant)


def clearing_before(scenario: Scenario, step: int) -> Clearing:
    """Return the way in which the gradients of the step before a step are cleared."""
    if scenario.variant == HALF.variant:
        return generator(scenario, f"clearing/{step}").choice(_BY_OPTIMIZER)
    if scenario.variant not in _VARIANTS and not rests(scenario):
        return Clearing.BY_TRAINER
    return generator(scenario, f"clearing/{step}").choice(_WAYS)
