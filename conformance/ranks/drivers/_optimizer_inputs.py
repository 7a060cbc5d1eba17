"""The gradients that optimizer wrappers are given under Join."""

import torch

from conformance.ranks.drivers.base import RankDriver


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
