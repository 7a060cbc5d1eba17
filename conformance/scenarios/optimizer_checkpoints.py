"""The scenario for optimizer wrappers that average gradients, with an activation checkpoint.

The backward of a reentrant checkpoint is a graph task within that of the whole model. A callback
that is queued in it runs when this inner task ends, and gradients of other parameters may arrive
later (fairscale #753). All numbers are drawn from the session's seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.optimizer import PLAIN
from conformance.scenarios.seeds import generator

CHECKPOINTED = replace(
    PLAIN,
    name="optimizer_checkpointed",
    summary="in most steps a part of the parameters is in a reentrant activation checkpoint: the "
    "part whose gradients arrive first, or the one whose gradients arrive last; the orders are "
    "drawn, as in `optimizer_own`",
    params=(*PLAIN.params, Param((7,)), Param((5, 3))),
    steps=("crafted",) * 5,
    world_sizes=(2,),
    variant="checkpointed",
)


@dataclass(frozen=True)
class Checkpointed:
    """The parameters in the checkpoint of a step, the same on all ranks.

    Attributes:
        indices: the parameters.
        is_first: whether their gradients arrive before those of all others, or after them.
    """

    indices: tuple[int, ...]
    is_first: bool

    def arranged(self, order: Sequence[int]) -> list[int]:
        """Return an order of arrival in which the parameters come first, or last."""
        inside = [index for index in order if index in self.indices]
        outside = [index for index in order if index not in self.indices]
        return inside + outside if self.is_first else outside + inside


def checkpointed_in(scenario: Scenario, step: int) -> Checkpointed | None:
    """Return the parameters that a checkpoint has in a step, if there is one.

    In two steps their gradients come first, in two they come last, and one step has no checkpoint.
    """
    if scenario.variant != CHECKPOINTED.variant:
        return None
    forms: list[bool | None] = [True, True, False, False, None]
    generator(scenario, "forms").shuffle(forms)
    is_first = forms[step]
    if is_first is None:
        return None
    draw = generator(scenario, f"checkpoint in {step}")
    params = range(len(scenario.params))
    indices = draw.sample(params, draw.randint(1, len(params) - 1))
    return Checkpointed(tuple(sorted(indices)), is_first)
