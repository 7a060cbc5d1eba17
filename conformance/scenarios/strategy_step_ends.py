"""How a trainer ends the steps of a strategy: whether its optimizers step, and the ways in which it
clears gradients.
"""

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy_schedule import (
    abandoned_after,
    batches,
    is_judged,
    raises_in,
)

BY_MODEL = "model"  # model.zero_grad()
BY_OPTIMIZERS = "optimizers"  # optimizer.zero_grad()
ONE_BY_ONE = "one by one"  # parameter.grad = None

WAYS_OF_CLEARING = (BY_MODEL, BY_OPTIMIZERS, ONE_BY_ONE)

# Steps after which a trainer, or its GradScaler, leaves the optimizers alone.
_NOT_FINITE = ("nan", "inf")
# The variants in which optimizers leave out steps whose gradients are like all others.
_LEAVE_OUT = ("abandoned", "turns", "long", "together")


def optimizers_step(scenario: Scenario, step: int) -> bool:
    """Whether the trainer calls step() of its optimizers when a step ends.

    It does not after a step that is given up, that ends by an exception, or whose gradients are not
    finite. In some scenarios it leaves out one or more of the others, by drawn numbers: half of
    them at most, and never the last step.
    """
    if not _may_step(scenario, step):
        return False
    if scenario.variant not in _LEAVE_OUT:
        return True
    others = [one for one in range(len(scenario.steps) - 1) if _may_step(scenario, one)]
    draw = generator(scenario, "steps without optimizers")
    return step not in draw.sample(others, draw.randint(1, max(1, len(others) // 2)))


def way_of_clearing(scenario: Scenario, step: int) -> str:
    """Return the way in which gradients are cleared before a step.

    If the step before is given up, or ends by an exception, its gradients are cleared in that way
    too, as it ends. Steps that follow such a step have the three ways in turn, and so have the
    others; the orders are drawn.
    """
    is_after_break = _is_after_break(scenario, step)
    turn = sum(_is_after_break(scenario, one) == is_after_break for one in range(step))
    ways = list(WAYS_OF_CLEARING)
    generator(scenario, f"ways of clearing, {is_after_break}").shuffle(ways)
    return ways[turn % len(ways)]


def cleared_parts(scenario: Scenario, step: int) -> list[tuple[int, int]]:
    """Return the micro-batches of the step before a step, whose gradients are cleared.

    Of a step that is given up, or ends by an exception, they are those before the end.
    """
    if not step:
        return []
    before = step - 1
    breaks = [abandoned_after(scenario, before), raises_in(scenario, before)]
    number = min([batches(scenario, before), *(one for one in breaks if one is not None)])
    return [(before, batch) for batch in range(number)]


def _may_step(scenario: Scenario, step: int) -> bool:
    return is_judged(scenario, step) and scenario.steps[step] not in _NOT_FINITE


def _is_after_break(scenario: Scenario, step: int) -> bool:
    return step > 0 and not is_judged(scenario, step - 1)
