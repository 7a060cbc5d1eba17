"""The losses that closures return in steps of an optimizer.

They differ between steps, to be recognised in the result. In drawn steps the loss of one rank alone
is NaN, an infinity or its negative, as if a batch had one broken sample; zero, as if every label
were ignored; negative, large or tiny. Gradients are ordinary in these steps, so that torch's
optimizers step as ever. They also do so after a closure without a ``return``, which leaves
gradients and returns None.
"""

import math
import random

from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_closures import returns_nothing

_BROKEN = (math.nan, math.inf, -math.inf, 0.0)


def loss_of(scenario: Scenario, step: int, place: int, size: int) -> float | None:
    """Return the loss that the closure of a rank returns, or None if all closures return nothing.

    Args:
        scenario: has a closure in the step.
        step: the number of the step.
        place: of the rank in its group.
        size: of the group.
    """
    if returns_nothing(scenario, step):
        return None
    if scenario.variant != "closure":
        return step + 1.0
    draw = random.Random(f"{scenario.session_seed}/{scenario.name}/losses")
    # Exact in float32. One is of the size of a sum over a batch, and one is nearly zero.
    unusual = (-draw.randint(1, 10) / 4, 2.0 ** draw.randint(8, 26), 2.0 ** -draw.randint(13, 40))
    losses = (*_BROKEN, *unusual)
    count = min(len(losses), len(scenario.steps))
    steps = draw.sample(range(len(scenario.steps)), count)
    places = [draw.randrange(12) % size for _ in steps]
    for broken_step, broken_place, loss in zip(steps, places, losses[:count], strict=True):
        if (step, place) == (broken_step, broken_place):
            return loss
    return step + 1.0


def is_same_loss(loss: float | None, expected: float | None) -> bool:
    """Whether a loss is the expected one; NaN is equal to NaN."""
    if loss is None or expected is None:
        return loss is expected
    return loss == expected or (math.isnan(loss) and math.isnan(expected))
