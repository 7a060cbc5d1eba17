"""Mutants of section 15: learning rates in tensors, added groups, and states of other forms."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded

# Learning rates in tensors


class CopiesTheNumber(Sharded):
    """Take the number of a learning rate in a tensor once, when the group is made."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        self.numbers = [float(group["lr"]) for group in self.param_groups]

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self.numbers.append(float(self.param_groups[-1]["lr"]))

    def write_options(self) -> None:
        super().write_options()
        for mine, number in zip(self.local.param_groups, self.numbers, strict=True):
            if isinstance(mine["lr"], torch.Tensor):
                mine["lr"] = torch.tensor(number)


class ComparesIdentities(Sharded):
    """Copy a learning rate to the inner optimizer if it is another object than before."""

    latest: tuple[Any, ...] = ()

    def write_options(self) -> None:
        known = [mine["lr"] for mine in self.local.param_groups]
        super().write_options()
        rates = tuple(group["lr"] for group in self.param_groups)
        for place, mine in enumerate(self.local.param_groups):
            if self.latest[place : place + 1] and self.latest[place] is rates[place]:
                mine["lr"] = known[place]
            elif isinstance(mine["lr"], torch.Tensor):
                mine["lr"] = mine["lr"].clone()
        self.latest = rates


class TurnsRatesIntoNumbers(PostLocal):
    """Replace learning rates in tensors by numbers when a state is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for group in self.optim.param_groups:
            group["lr"] = float(group["lr"])


class AddsNumbers(PostLocal):
    """Give the inner optimizer an added group whose learning rate is a number."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group({**group, "lr": float(group["lr"])})


class KeepsTheFirstTensors(PostLocal):
    """Put the tensors of the first learning rates back after a state was loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rates = [group["lr"] for group in self.optim.param_groups]
        super().load_state_dict(state)
        for group, rate in zip(self.optim.param_groups, rates, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"] = rate


OF = {"kind": "optimizer"}
MUTANTS = [
    *(
        Mutant(name, ("15.6",), **OF)
        for name in ("CopiesTheNumber", "ComparesIdentities", "AddsNumbers")
    ),
    *(Mutant(name, ("15.14",), **OF) for name in ("TurnsRatesIntoNumbers", "KeepsTheFirstTensors")),
]
