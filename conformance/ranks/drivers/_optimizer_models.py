"""The models of optimizer wrappers, whose parameters may be views of one flat buffer."""

from typing import Protocol

import torch

from conformance.ranks.models.flat_buffers import FlatBuffers
from conformance.ranks.models.probe import Probe
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_training import MANY_GROUPS


class Rank(Protocol):
    """The parts of the driver of optimizers that a model needs."""

    scenario: Scenario
    rank: int
    device: torch.device


def make_model(driver: Rank) -> Probe:
    """Return the model of a rank; with many groups, its parameters share the storage of a buffer.

    Their order in the buffer, and the gaps between them, are drawn.
    """
    scenario = driver.scenario
    model = Probe(scenario.params, 0.0, driver.rank).to(driver.device)
    if scenario.variant == MANY_GROUPS.variant:
        seed = f"{scenario.session_seed}/{scenario.name}/flat"
        buffers = FlatBuffers(model.tensors, seed, driver.rank)
        for parameter, view in zip(model.tensors, buffers.views, strict=True):
            parameter.data = view
    return model
