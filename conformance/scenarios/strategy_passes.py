"""Backward passes in the micro-batches of a strategy, as data.

A backward pass adds to the gradients that are there, also if it is the second one through the
output of a forward: that of another loss, with ``retain_graph``, or of other parameters, with
``inputs``. ``torch.autograd.grad()`` through that output adds nothing. DDP waits for the first
gradient of each parameter after its last forward, averages, and leaves a second one as it is.

A penalty, or an auxiliary loss, often comes once in a step, or in some steps alone: contexts before
do not show that one has more passes.
"""

import random
from dataclasses import dataclass

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy_schedule import batches
from conformance.scenarios.strategy_training import PARTS, PASSES, PENALTIES, SECOND

ONCE = "once"  # a forward and its backward
ALTERNATING = "alternating"  # the same twice, or more often
RETAINED = "retained"  # a forward and two backwards, or more, through its output
FORWARDS_FIRST = "forwards_first"  # two forwards, or more, and then their backwards
SOME_AGAIN = "some_again"  # a forward, its backward, and further ones that are given inputs
ASKED = "asked"  # a forward, torch.autograd.grad(), and a backward
IN_PARTS = "in_parts"  # a forward, and two backwards that are given inputs

_WAYS = {
    SECOND.variant: (ALTERNATING,),
    PASSES.variant: (RETAINED, FORWARDS_FIRST),
    PARTS.variant: (ASKED, IN_PARTS),
}
_ADD_TWICE = (ALTERNATING, RETAINED, FORWARDS_FIRST)

# Penalties of a strategy that DDP averages for have forwards of their own (``BY_FORWARDS``).
BY_FORWARDS = "penalties_by_forwards"
_OF_PENALTIES = {
    PENALTIES.variant: (ALTERNATING, RETAINED, FORWARDS_FIRST, SOME_AGAIN),
    BY_FORWARDS: (ALTERNATING,),
}
# The steps from the first one with a penalty on, at least.
_WITH_PENALTIES = 6


@dataclass(frozen=True)
class Passes:
    """The passes of a micro-batch.

    Attributes:
        way: one of the constants of this module.
        some: parameters: those of ``torch.autograd.grad()``, of the first of two backwards, or of
            all backwards but the first.
        count: the number of passes, in the ways that add to a gradient in each of them.
    """

    way: str = ONCE
    some: tuple[int, ...] = ()
    count: int = 2

    def times(self, index: int) -> int:
        """Return how often the micro-batch adds its values to the gradient of a parameter."""
        adds_again = self.way in _ADD_TWICE or (self.way == SOME_AGAIN and index in self.some)
        return self.count if adds_again else 1


def passes_of(scenario: Scenario, step: int, batch: int) -> Passes:
    """Return the passes of a micro-batch.

    The ways of a scenario come in turn in last micro-batches, and are drawn in others.
    """
    if scenario.variant in _OF_PENALTIES:
        return _with_penalty(scenario, step, batch)
    ways = _WAYS.get(scenario.variant, (ONCE,))
    if len(ways) == 1:
        return Passes(ways[0])
    draws = generator(scenario, f"passes {step}/{batch}")
    some = _drawn_parameters(scenario, draws)
    if batch < batches(scenario, step) - 1:
        return Passes(draws.choice(ways), some)
    first = generator(scenario, "first way").randrange(len(ways))
    return Passes(ways[(first + step) % len(ways)], some)


def first_penalty(scenario: Scenario) -> int:
    """Return the first step with a penalty, which is drawn: contexts before have one pass each."""
    last = len(scenario.steps) - _WITH_PENALTIES
    return generator(scenario, "first penalty").randint(1, last)


def _with_penalty(scenario: Scenario, step: int, batch: int) -> Passes:
    if batch not in _penalised(scenario, step):
        return Passes()
    draws = generator(scenario, f"passes {step}/{batch}")
    some = _drawn_parameters(scenario, draws)
    # At last a context has more passes than any before.
    count = 3 if step == len(scenario.steps) - 1 else 2
    return Passes(draws.choice(_OF_PENALTIES[scenario.variant]), some, count)


def _penalised(scenario: Scenario, step: int) -> frozenset[int]:
    """Return the micro-batches of a step that have a penalty.

    The first penalty is in the last micro-batch of its step alone, and so is that of the last step.
    In a drawn step between them earlier micro-batches alone have some.
    """
    first = first_penalty(scenario)
    final = len(scenario.steps) - 1
    last_batch = batches(scenario, step) - 1
    if step < first:
        return frozenset()
    if step in (first, final):
        return frozenset((last_batch,))
    draws = generator(scenario, f"penalties {step}")
    if step == generator(scenario, "earlier alone").randrange(first + 1, final):
        return frozenset(draws.sample(range(last_batch), draws.randint(1, last_batch)))
    return frozenset(batch for batch in range(last_batch + 1) if draws.random() < 0.3)


def _drawn_parameters(scenario: Scenario, draws: random.Random) -> tuple[int, ...]:
    """Return some of the parameters, and not all."""
    count = len(scenario.params)
    return tuple(draws.sample(range(count), draws.randint(1, count - 1)))
