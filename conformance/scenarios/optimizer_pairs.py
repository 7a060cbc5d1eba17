"""Pairs of steps of two optimizers whose models both get their gradients before either one steps.

Two optimizers share one loss if each has a part of the parameters: Muon the matrices and AdamW the
rest, or one has an encoder and the other one a head. A GAN may have two backwards before two steps.
All is drawn from the session's seed.
"""

from dataclasses import dataclass

from conformance.scenarios.averager_training import turn
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_training import TWO, TWO_GROUPS
from conformance.scenarios.seeds import generator


@dataclass(frozen=True)
class Pair:
    """Two steps in a row, of two models.

    Attributes:
        backwards: these steps, in the order of their gradients.
        is_joint: whether both models have their gradients from one backward of the sum.
    """

    backwards: tuple[int, int]
    is_joint: bool

    @property
    def first(self) -> int:
        """The step that comes first."""
        return min(self.backwards)


def pair_of(scenario: Scenario, step: int) -> Pair | None:
    """Return the pair that a step belongs to, or None."""
    if scenario.variant != TWO.variant:
        return None
    return next((pair for pair in _pairs(scenario) if step in pair.backwards), None)


def _pairs(scenario: Scenario) -> list[Pair]:
    """Return two of three pairs that fit; every other one has a joint backward.

    Backwards of two groups of ranks are separate, since an optimizer may average within them.
    """
    draw = generator(scenario, "pairs")
    firsts = []
    step = 0
    while step + 1 < len(scenario.steps):
        fits = turn(scenario, step)[0] != turn(scenario, step + 1)[0]
        if fits:
            firsts.append(step)
        step += 2 if fits else 1
    chosen = draw.sample(firsts, min(len(firsts), max(2, len(firsts) * 2 // 3)))
    may_join = scenario.name != TWO_GROUPS.name
    pairs = []
    for place, first in enumerate(chosen):
        backwards = (first, first + 1) if draw.random() < 0.5 else (first + 1, first)
        pairs.append(Pair(backwards, is_joint=may_join and place % 2 == 0))
    return pairs
