"""A model and the averager that the subject has made for it."""

from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.ranks.drivers._given_parameters import Parameters
from conformance.ranks.models.flat_buffers import FlatBuffers


@dataclass
class Trainee:
    """A model and its averager.

    Attributes:
        params: the parameters of the model.
        group: the process group.
        ranks: the global ranks of the group.
        place: of this rank in the group.
        averager: the subject.
        buffers: the parameters are views of these, if the scenario has any.
        takes_params: the averager was given the parameters when it was made.
        was_loaded: a state was loaded after the last recorded call.
        kept: the values of the parameters after the last recorded call.
    """

    params: Parameters
    group: Any
    ranks: tuple[int, ...]
    place: int
    buffers: FlatBuffers | None = None
    averager: Any = None
    takes_params: bool = False
    was_loaded: bool = False
    kept: list[torch.Tensor] = field(default_factory=list)

    def take_params(self) -> Parameters:
        """Return the parameters for the averager to be made with."""
        self.takes_params = True
        return list(self.params)
