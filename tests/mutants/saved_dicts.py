"""Mutants of rule 11.2: a load that changes the dict that it is given, and a save that changes the
values in use.
"""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.saved_doubles import Residuals, larger_half

__all__ = ["MUTANTS", "larger_half"]


class TakesOut(Residuals):
    """Residuals that are moved out of the checkpoint, to save their copies."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.of = {key: saved.pop(key) for key in list(saved)}


class EmptiesLists(Residuals):
    """Residuals in a list, which a load uses up from its end."""

    def state_dict(self) -> dict[str, Any]:
        return {"keys": list(self.of), "values": [one.clone() for one in self.of.values()]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.of.clear()
        while saved["values"]:
            self.of[saved["keys"].pop()] = saved["values"].pop()


class RoundsToSave(Residuals):
    """Residuals that are rounded to bfloat16 where they are, so that checkpoints compress well."""

    def saved(self, residual: torch.Tensor) -> Any:
        return residual.copy_(residual.bfloat16().to(residual.dtype)).clone()


class DropsSmall(Residuals):
    """Residuals of which the small ones are dropped for good when a checkpoint is made."""

    def saved(self, residual: torch.Tensor) -> Any:
        return torch.nn.functional.hardshrink(residual, 0.05).clone()

    def state_dict(self) -> dict[str, Any]:
        self.of = {key: self.saved(residual) for key, residual in self.of.items()}
        return dict(self.of)


class StartsAnew(Residuals):
    """Residuals that are handed to the checkpoint: the next step begins without any."""

    def state_dict(self) -> dict[str, Any]:
        given, self.of = self.of, {}
        return given


_CLAIMS = "compressed(delta=0.25), world_only, checkpointable"

MUTANTS = [
    Mutant("larger_half", ("11.2",), _CLAIMS, f"{__name__}:{name}")
    for name in ("TakesOut", "EmptiesLists", "RoundsToSave", "DropsSmall", "StartsAnew")
]
