"""Backward passes in the micro-batches of a strategy, as data.

A backward pass adds to the gradients that are there, also if it is the second one through the
output of a forward: that of another loss, with ``retain_graph``, or of other parameters, with
``inputs``. ``torch.autograd.grad()`` through that output adds nothing. DDP waits for the first
gradient of each parameter after its last forward, averages, and leaves a second one as it is.
"""

from dataclasses import dataclass

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy_schedule import batches
from conformance.scenarios.strategy_training import PARTS, PASSES, SECOND

ONCE = "once"  # a forward and its backward
ALTERNATING = "alternating"  # the same twice
RETAINED = "retained"  # a forward and two backwards through its output
FORWARDS_FIRST = "forwards_first"  # two forwards, and then their backwards
ASKED = "asked"  # a forward, torch.autograd.grad(), and a backward
IN_PARTS = "in_parts"  # a forward, and two backwards that are given inputs

_WAYS = {
    SECOND.variant: (ALTERNATING,),
    PASSES.variant: (RETAINED, FORWARDS_FIRST),
    PARTS.variant: (ASKED, IN_PARTS),
}
_ADD_TWICE = (ALTERNATING, RETAINED, FORWARDS_FIRST)


@dataclass(frozen=True)
class Passes:
    """The passes of a micro-batch.

    Attributes:
        way: one of the constants of this module.
        some: parameters: those of ``torch.autograd.grad()``, or of the first of two backwards.
    """

    way: str = ONCE
    some: tuple[int, ...] = ()

    @property
    def times(self) -> int:
        """How often the micro-batch adds its values to each gradient."""
        return 2 if self.way in _ADD_TWICE else 1


def passes_of(scenario: Scenario, step: int, batch: int) -> Passes:
    """Return the passes of a micro-batch.

    The ways of a scenario come in turn in last micro-batches, and are drawn in others.
    """
    ways = _WAYS.get(scenario.variant, (ONCE,))
    if len(ways) == 1:
        return Passes(ways[0])
    draws = generator(scenario, f"passes {step}/{batch}")
    count = len(scenario.params)
    some = tuple(draws.sample(range(count), draws.randint(1, count - 1)))
    if batch < batches(scenario, step) - 1:
        return Passes(draws.choice(ways), some)
    first = generator(scenario, "first way").randrange(len(ways))
    return Passes(ways[(first + step) % len(ways)], some)
