"""The scenario for optimizer wrappers whose closures compute a part of the gradients.

``step(closure)`` leaves it to the closure which gradients it clears: a trainer that accumulates
gradients passes a closure for the last micro-batch alone (torch documentation,
``torch.optim.Optimizer.step``). The steps are drawn from the session's seed.
"""

from dataclasses import replace

from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import UNUSED
from conformance.scenarios.seeds import generator

CLOSURE_IN_PARTS = replace(
    UNUSED,
    name="optimizer_closure_in_parts",
    summary="each step has a closure, and each rank has gradients of other parameters; in half of "
    "the steps a backward before the step leaves a half of the gradients, and the closure adds the "
    "other one; in two steps the closures return nothing",
    world_sizes=(2,),
    variant="closure_in_parts",
)


def comes_in_parts(scenario: Scenario, step: int) -> bool:
    """Whether half of the gradients are there before a step whose closure adds the others."""
    if scenario.variant != CLOSURE_IN_PARTS.variant:
        return False
    steps = range(len(scenario.steps))
    return step in generator(scenario, "parts").sample(steps, len(steps) // 2)


def returns_nothing(scenario: Scenario, step: int) -> bool:
    """Whether the closures of all ranks return None at a step, as those without ``return``."""
    if scenario.variant != CLOSURE_IN_PARTS.variant:
        return False
    return step in generator(scenario, "nothing").sample(range(len(scenario.steps)), 2)
