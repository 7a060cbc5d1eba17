"""Mutants of rules 15.13 and 15.28: a state holds the place of the rank that saved it."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.optimizers_in_training import Averaging


class AtOwners(Averaging):
    """The right optimizer that divides each sum on one rank, which sends the mean to all."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.place = dist.get_rank(process_group)
        self.places: list[int] = []
        super().__init__(optim, process_group)

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self.places.append(self.place)

    def average(self, params: list[torch.nn.Parameter]) -> None:
        places = {
            parameter: place
            for place, group in zip(self.places, self.param_groups, strict=True)
            for parameter in group["params"]
        }
        for number, parameter in enumerate(params):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            owner = number % self.size
            self.average_at(parameter.grad, owner, is_owner=owner == places[parameter])

    def average_at(self, grad: torch.Tensor, owner: int, *, is_owner: bool) -> None:
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        if is_owner:
            total /= self.size
        source = dist.get_global_rank(self.group or dist.group.WORLD, owner)
        dist.broadcast(total, source, group=self.group)
        grad.copy_(total)


class SavesItsPlace(AtOwners):
    """Save this rank's place, and load the place of the rank that has saved."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "places": list(self.places)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.places = list(state.pop("places"))
        super().load_state_dict(state)


class SavesPlacesOfGroups(SavesItsPlace):
    """Load the place of the rank that has saved, for all groups but the first."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.places[0] = self.place


OF = {"claims": "averages", "kind": "optimizer"}
MUTANTS = [
    Mutant("SavesItsPlace", ("15.13",), because={"15.28": "its states are loaded too"}, **OF),
    Mutant("SavesPlacesOfGroups", ("15.28",), **OF),
]
