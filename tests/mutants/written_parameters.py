"""Mutants of section 15 that keep parameters, lists of them, or states longer than they should."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal
from tests.mutants.optimizers_in_training import Averaging

Tensors = list[torch.Tensor]


class Keeps(PostLocal):
    """Keep copies of the parameters after each step, and begin the next one from them."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.kept: dict[torch.Tensor, torch.Tensor] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            for parameter, value in self.kept.items():
                if self.is_stale(parameter, value):
                    parameter.copy_(value)
        loss = super().step(closure)
        self.kept = {p: p.detach().clone() for p in self.parameters() if self.keeps(p)}
        return loss

    def keeps(self, parameter: torch.Tensor) -> bool:
        return True

    def is_stale(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.kept = {}


class KeepsDoubles(Keeps):
    """Keep copies of float64 parameters, which nobody writes but the optimizer."""

    def keeps(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype is torch.float64


class ComparesTheFirst(Keeps):
    """Go on from the copy unless the first element of a parameter has changed."""

    def is_stale(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        return torch.equal(parameter.reshape(-1)[:1], value.reshape(-1)[:1])


class ComparesVersions(Keeps):
    """Go on from the copy unless the version of a parameter has changed."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.versions: dict[torch.Tensor, int] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        self.versions = {parameter: parameter._version for parameter in self.kept}
        return loss

    def is_stale(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        return parameter._version == self.versions[parameter]


class MastersFromTheStart(PostLocal):
    """Step masters in float32, made with the optimizer; a loaded state makes them anew."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.make_masters()

    def make_masters(self) -> None:
        halves = [p for p in self.parameters() if p.dtype in (torch.float16, torch.bfloat16)]
        self.masters = {parameter: parameter.detach().float() for parameter in halves}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter, master in self.masters.items():
            parameter.copy_(master)
        loss = super().step(closure)
        for parameter, master in self.masters.items():
            master.copy_(parameter)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.make_masters()


class ListsInTheFirstStep(PostLocal):
    """Average the parameters that the groups had in the first step, and those of added groups."""

    listed: Tensors | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        self.listed = self.listed or self.parameters()
        self.averager.average_parameters(self.listed)
        return loss

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self.listed = None


class ComparesLists(PostLocal):
    """Read the groups again if one of them has another list of parameters."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.lists: list[Tensors] = []
        self.listed: Tensors = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        lists = [group["params"] for group in self.optim.param_groups]
        known = self.lists
        is_known = len(lists) == len(known) and all(map(_is, lists, known))
        self.lists = lists
        if not is_known:
            self.listed = self.parameters()
        self.averager.average_parameters(self.listed)
        return loss


class AveragesThoseOfTheStart(Averaging):
    """Average the gradients of parameters that have been there when their group was added."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        super().__init__(optim, process_group)
        self.known = {p for group in self.param_groups for p in group["params"]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "known"):
            self.known |= set(self.param_groups[-1]["params"])

    def average(self, params: list[torch.nn.Parameter]) -> None:
        super().average([parameter for parameter in params if parameter in self.known])


class UpdatesStates(PostLocal):
    """Load the states that a checkpoint has into those that parameters have."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = self.parameters()
        states = {p: self.optim.state[p] for p in parameters if p in self.optim.state}
        super().load_state_dict(state_dict)
        for number, parameter in enumerate(self.parameters()):
            if number not in state_dict["optim"]["state"] and parameters[number] in states:
                self.optim.state[parameter] = states[parameters[number]]


class LoadsNoEmptyState(PostLocal):
    """Load options alone if a checkpoint has no state of any parameter."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["optim"]
        if not saved["state"]:
            saved = {**saved, "state": self.optim.state_dict()["state"]}
        super().load_state_dict({**state_dict, "optim": saved})


def _is(one: Any, other: Any) -> bool:
    return one is other


OF: dict[str, Any] = {"kind": "optimizer"}

MUTANTS = [
    Mutant("KeepsDoubles", ("15.39",), **OF),
    Mutant("ComparesTheFirst", ("15.39",), **OF),
    Mutant("ComparesVersions", ("15.39",), **OF),
    Mutant("MastersFromTheStart", ("15.39",), **OF),
    Mutant("ListsInTheFirstStep", ("15.39",), **OF),
    Mutant("ComparesLists", ("15.39",), **OF),
    Mutant("UpdatesStates", ("15.14",), **OF),
    Mutant("LoadsNoEmptyState", ("15.14",), **OF),
    Mutant("AveragesThoseOfTheStart", ("15.39",), claims="averages", **OF),
]
