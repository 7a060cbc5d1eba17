"""Parameters that others take the place of in the optimizer of a strategy's model, as data."""

import random
from dataclasses import dataclass

from conformance.scenarios.model import Scenario


@dataclass(frozen=True)
class Swap:
    """Parameters that others take the place of; their number stays.

    Attributes:
        step: the step before which the optimizer drops some parameters and is given as many others.
        dropped: the first of these, which are used before that step alone.
        given: the others, which are used from that step on.
        renewed_at: the step before which layers are replaced by new ones of the same shapes, and
            the model is wrapped in DDP again.
        renewed: the parameters of these layers.
    """

    step: int
    dropped: frozenset[int]
    given: frozenset[int]
    renewed_at: int
    renewed: tuple[int, ...]

    def unused(self, step: int) -> frozenset[int]:
        """Return the parameters that no rank uses in a step, and no optimizer has."""
        return self.given if step < self.step else self.dropped


def swap_of(scenario: Scenario) -> Swap | None:
    """Return the parameters that are swapped in a scenario, if any are."""
    if scenario.variant != "swapped":
        return None
    numbers = random.Random(f"{scenario.session_seed}/{scenario.name}")
    every = range(len(scenario.params))
    drawn = numbers.sample(every, 2 * numbers.randint(1, 3))
    dropped = frozenset(drawn[::2])
    step = numbers.randint(1, 3)
    return Swap(
        step=step,
        dropped=dropped,
        given=frozenset(drawn[1::2]),
        renewed_at=numbers.randint(step + 1, len(scenario.steps) - 1),
        # Hooks of a strategy on a parameter that stays would belong to both models.
        renewed=tuple(every),
    )
