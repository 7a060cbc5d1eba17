"""The order in which the gradients of a backward arrive.

Autograd runs first the nodes that the forward made last. The order of gradients is therefore that
of the code that the forward ran, and ranks that add the losses of several tasks in another order,
or take other branches, receive their gradients in another order (DeepSpeed #2343). Collectives of
single gradients, in the order of arrival, then mix up gradients of one size without an error.
Which gradient comes last is not known beforehand either: it need not be that of the first
parameter.
"""

import math
import random
from collections.abc import Sequence

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.seeds import generator

# Two models in one backward are not among them: if two right optimizers average in callbacks at
# the end of a backward, these come in the order in which the models' first gradients arrive.
_SCENARIOS = (
    *("strategy", "strategy_accumulated", "strategy_random"),
    *("optimizer_own", "optimizer_accumulated", "optimizer_checkpointed"),
)

# One scenario of each kind: the others begin with one order on all ranks as often as not.
_APART_AT_ENDS = ("optimizer_own", "strategy")


def arrival_order(scenario: Scenario, step: int, rank: int) -> list[int] | None:
    """Return the parameters in the order in which their gradients arrive on a rank in a step.

    The order is drawn for each step. It is the same on all ranks in half of the steps. In the
    others, parameters of as many elements change places from one rank to the next. In some
    scenarios the first step and the last one are among these.

    Returns:
        None if the last parameter's gradient comes first on all ranks, and that of the first last.
    """
    if scenario.name not in _SCENARIOS:
        return None
    order = list(range(len(scenario.params)))
    generator(scenario, f"arrival in {step}").shuffle(order)
    if step in _steps_apart(scenario):
        _turn_alike(order, scenario.params, rank)
    return order


def _steps_apart(scenario: Scenario) -> list[int]:
    """Return the steps in which ranks have other orders: half of them, or one more.

    The first step and the last one are among them in some scenarios: an order may be recorded once.
    """
    steps = range(len(scenario.steps))
    draw: random.Random = generator(scenario, "steps of other orders")
    count = math.ceil(len(steps) / 2)
    if scenario.name not in _APART_AT_ENDS:
        return draw.sample(steps, count)
    return [steps[0], steps[-1], *draw.sample(steps[1:-1], count - 2)]


def _turn_alike(order: list[int], params: Sequence[Param], rank: int) -> None:
    """Let the parameters of each size take each other's places, by one place for each rank."""
    places: dict[tuple[int, str], list[int]] = {}
    for place, index in enumerate(order):
        key = (math.prod(params[index].shape), params[index].dtype)
        places.setdefault(key, []).append(place)
    for alike in places.values():
        indices = [order[place] for place in alike]
        first = rank % len(indices)
        for place, index in zip(alike, indices[first:] + indices[:first], strict=True):
            order[place] = index
