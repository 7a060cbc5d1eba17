"""Mutants of rules 15.14, 15.23, 15.24 and 15.28: groups that are added while parameters rest, or
after a state was loaded."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded
from tests.right.optimizer_wrappers import AveragesGradients, average_gradients


class ClearsIdleAtAdd(PostLocal):
    """Drop the states of parameters without a gradient when a group is added."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        for parameter in self.parameters():
            if parameter.grad is None:
                self.optim.state.pop(parameter, None)


class SharesAnewAtAdd(Sharded):
    """Share out the trainable parameters anew when a group is added: others begin from zeros."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        for parameter, state in self.local.state.items():
            if not parameter.requires_grad and "momentum_buffer" in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)


class RestartsFrozenCounts(AveragesGradients):
    """Let Adam count from 0 again, for parameters that are frozen when a group is added."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if "optim" not in self.__dict__:
            return
        for parameter, state in self.optim.state.items():
            if not parameter.requires_grad and "step" in state:
                state["step"] = torch.zeros_like(state["step"])


class AveragesLoaded(PostLocal):
    """Average the parameters that a load has found, and no others from then on."""

    loaded: list[torch.Tensor] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.loaded or self.parameters())
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.loaded = self.parameters()


class AveragesGroupsOfTheLoad(AveragesGradients):
    """Average the gradients of as many groups as a load has found."""

    count: int | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        size = dist.get_world_size(self.group)
        average_gradients(self.param_groups[: self.count], self.group, lambda grad: grad / size)
        self.optim.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = len(self.param_groups)


class SchedulesLoaded(Sharded):
    """Pass the options of as many groups to the inner optimizer as a load has found."""

    count: int | None = None

    def write_options(self) -> None:
        groups = self.param_groups[: self.count]
        for mine, group in zip(self.local.param_groups, groups, strict=False):
            mine.update({name: value for name, value in group.items() if name != "params"})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = len(self.param_groups)


class NumbersOfTheFirstSave(Sharded):
    """Number the parameters in the first save: later ones lack the states of added groups."""

    count: int | None = None

    def consolidate_state_dict(self, to: int = 0) -> None:
        super().consolidate_state_dict(to)
        if self.count is None:
            self.count = len(self.parameters())
        self.consolidated = {
            number: kept for number, kept in self.consolidated.items() if number < self.count
        }


class EntriesOfTheFirstSave(PostLocal):
    """List the parameters in the first save, and save the states of no others."""

    listed: set[torch.Tensor] | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.listed is None:
            self.listed = set(self.parameters())
        state = super().state_dict()
        numbers = [n for n, one in enumerate(self.parameters()) if one in self.listed]
        inner = state["optim"]
        kept = {number: inner["state"][number] for number in numbers if number in inner["state"]}
        return {**state, "optim": {**inner, "state": kept}}


OF = {"kind": "optimizer"}
_RESUMED = {"15.28": "a group is added after a load in new processes as well"}
MUTANTS = [
    Mutant("ClearsIdleAtAdd", ("15.23",), **OF),
    Mutant("SharesAnewAtAdd", ("15.24",), **OF),
    Mutant("RestartsFrozenCounts", ("15.24",), "averages", **OF),
    *(
        Mutant(name, ("15.14",), because=_RESUMED, **OF)
        for name in ("AveragesLoaded", "SchedulesLoaded")
    ),
    *(
        Mutant(name, ("15.28",), **OF)
        for name in ("NumbersOfTheFirstSave", "EntriesOfTheFirstSave")
    ),
    Mutant("AveragesGroupsOfTheLoad", ("15.14",), "averages", because=_RESUMED, **OF),
]
