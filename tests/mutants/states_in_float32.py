"""Mutants of rule 15.14: states in float32 of weights in half precision, which a load rounds."""

import copy
from typing import Any

import torch

from tests.mutants import Mutant
from tests.right.optimizers_in_half import HALVES, CopiesApart, InFloat32


class RoundsMomentaOfFloat16(InFloat32):
    """Load the momenta of float16 as torch.optim does, in the dtype of their parameter."""

    def put_back(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        rounds = name == "momentum_buffer" and parameter.dtype == torch.float16
        return value.to(parameter.dtype).float() if rounds else value.clone()


class LoadsIntoItsStates(InFloat32):
    """Copy loaded values to the tensors that there are, or to new ones like the parameter."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.present = dict(self.state)
        super().load_state_dict(state_dict)

    def put_back(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        kept = self.present.get(parameter, {}).get(name)
        there = torch.zeros_like(parameter) if kept is None else kept
        return there.copy_(value).to(value.dtype)


class SavesHalves(InFloat32):
    """Save the momenta in the dtype of their parameter, which takes half of the space."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        saved = copy.deepcopy(state["state"])
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, kept in saved.items():
            if "momentum_buffer" in kept:
                kept["momentum_buffer"] = kept["momentum_buffer"].to(params[number].dtype)
        return {**state, "state": saved}

    def put_back(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        return value.to(torch.float32 if parameter.dtype in HALVES else value.dtype, copy=True)


class ForgetsWeights(InFloat32):
    """Make the copies of weights in float32 anew from the loaded, rounded weights."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for kept in self.state.values():
            kept.pop("weight", None)


class LoadsIntoItsWeights(InFloat32):
    """Load weights into the copies that there are, which steps make: a new object has none."""

    def prepare(self) -> None:
        self.stepped: set[torch.Tensor] = set()

    def _step(self, parameter: torch.Tensor, grad: torch.Tensor, options: dict[str, Any]) -> None:
        self.stepped.add(parameter)
        super()._step(parameter, grad, options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for parameter, kept in self.state.items():
            if parameter not in self.stepped:
                kept.pop("weight", None)


class KeepsWeightsByObject(CopiesApart):
    """Save the copies of weights by the numbers of their objects: a new model has others."""

    def number(self, parameter: torch.Tensor) -> int:
        return id(parameter)


class RoundsAtTheFirstLoad(InFloat32):
    """Take the loaded momenta as they are, but for those of the first load, which are rounded."""

    has_loaded = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.has_loaded = True

    def put_back(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        if name == "momentum_buffer" and not self.has_loaded:
            return value.to(parameter.dtype).to(value.dtype)
        return super().put_back(parameter, name, value)


MUTANTS = [
    Mutant(name, ("15.14",), "averages", kind="optimizer")
    for name in (
        *("RoundsMomentaOfFloat16", "LoadsIntoItsStates", "SavesHalves", "ForgetsWeights"),
        *("LoadsIntoItsWeights", "KeepsWeightsByObject", "RoundsAtTheFirstLoad"),
    )
]
