"""The gradients that optimizer wrappers are given."""

import torch

from conformance.ranks.drivers.base import RankDriver
from conformance.scenarios.gradients import uses
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_training import is_empty, is_frozen, lacks_gradient


def has_gradient(scenario: Scenario, size: int, place: int | None, step: int, index: int) -> bool:
    """Whether a rank has a gradient for a parameter.

    Args:
        place: of the rank in its group; None for any rank of the group.
    """
    if is_frozen(scenario, step, index) or lacks_gradient(scenario, step, index):
        return False
    places = range(size) if place is None else (place,)
    return any(
        not is_empty(scenario, step, other, size)
        and (scenario.variant != "unused" or uses(size, other, step, index))
        for other in places
    )


def mean_of_inputs(driver: RankDriver, step: int, index: int) -> torch.Tensor:
    """Return the mean gradient of a step; ranks without inputs contribute zeros."""
    scenario = driver.scenario
    kind = scenario.steps[step]
    values = [
        driver.values(kind, step, index, rank)
        for rank in range(driver.world)
        if scenario.has_input(rank, driver.world, step)
    ]
    return sum(values[1:], values[0]) / driver.world
