"""Mutants of section 11: state that is shared between models, or lost in a checkpoint."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    change_gradient,
    finite,
    is_dense,
    pieces_of,
    seeded,
)

Key = tuple[Any, ...]
_residuals: dict[Key, torch.Tensor] = {}


_seen: dict[torch.Tensor, Key] = {}


def _keys(bucket: Bucket) -> list[Key]:
    """Return a key for each parameter: its first bucket's index, and its position there.

    The keys identify the parameters of a model in any process.
    """
    return [
        _seen.setdefault(parameter, (bucket.index(), place))
        for place, parameter in enumerate(bucket.parameters())
    ]


def _half_at_random(bucket: Bucket, step: int, residuals: dict[Key, torch.Tensor]) -> Result:
    """Send a random half of the elements, and keep the others for later: right.

    The half is drawn by step and parameter.
    """
    if not is_dense(bucket):
        return average(bucket, None)
    for key, piece in zip(_keys(bucket), pieces_of(bucket), strict=True):
        total = piece + residuals.get(key, 0)
        piece.copy_(total * (torch.rand(total.shape, generator=seeded(step, *key)) < 0.5))
        residuals[key] = finite(total - piece)
    return average(bucket, None)


class Steps:
    """A state that counts steps."""

    def __init__(self) -> None:
        self.step = 0


class Residuals(Steps):
    """A state that counts steps and keeps residuals, the whole state to save."""

    def __init__(self) -> None:
        super().__init__()
        self.residuals: dict[Key, torch.Tensor] = {}


# 11.1 Two models


def residuals_in_module(state: Steps, bucket: Bucket) -> Result:
    """Keep residuals in the module, by the position of their parameter."""
    step = state.step
    state.step += bucket.is_last()
    return _half_at_random(bucket, step, _residuals)


class StepsOfAll:
    """A state that counts the steps of all states."""

    step = 0


def seeds_by_class(state: StepsOfAll, bucket: Bucket) -> Result:
    """Draw elements by a step count that all states share."""
    generator = seeded(StepsOfAll.step, bucket.index())
    StepsOfAll.step += bucket.is_last()
    return change_gradient(
        bucket, None, lambda grad: grad * (torch.rand(grad.shape, generator=generator) < 0.5) * 2
    )


# 11.2 to 11.4 Checkpoints


def half_at_random(state: Residuals, bucket: Bucket) -> Result:
    """Send a random half of the elements, and keep the others in the state."""
    step = state.step
    state.step += bucket.is_last()
    return _half_at_random(bucket, step, state.residuals)


class Saved(Residuals):
    """A state that is saved as a dictionary: right."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


class ForgetsSteps(Saved):
    """Load a step count of zero."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict({**saved, "step": 0})


class ForgetsResiduals(Saved):
    """Leave the residuals out of the saved state."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}


class Unsavable(Saved):
    """Save a lambda, which cannot be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "draw": lambda: 0}


class SavedByPlace(Saved):
    """Save residuals side by side, without their parameters.

    They are loaded in the order in which a new process sees its parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latest: list[Key] = []
        self.loaded = torch.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loaded": torch.cat([self.residuals[key] for key in self.latest]),
        }


def half_at_random_by_place(state: SavedByPlace, bucket: Bucket) -> Result:
    """Send a random half of the elements, with residuals saved side by side."""
    state.latest = _keys(bucket)
    if len(state.loaded):
        parts = state.loaded.split([piece.numel() for piece in pieces_of(bucket)])
        state.residuals.update(zip(state.latest, parts, strict=True))
        state.loaded = torch.zeros(0)
    return half_at_random(state, bucket)


_RESIDUALS = "compressed(delta=0.25), world_only"
_SAVED = "compressed(delta=0.25), world_only, checkpointable"
_STATE = "tests.mutants.state:"

MUTANTS = [
    Mutant("residuals_in_module", ("11.1",), _RESIDUALS, f"{_STATE}Steps"),
    Mutant("seeds_by_class", ("11.1",), "unbiased, world_only", f"{_STATE}StepsOfAll"),
    *(
        Mutant("half_at_random", ("11.2",), _SAVED, f"{_STATE}{kind}")
        for kind in ("ForgetsSteps", "ForgetsResiduals", "Unsavable")
    ),
    Mutant("half_at_random_by_place", ("11.3",), _SAVED, f"{_STATE}SavedByPlace"),
    Mutant("half_at_random", ("11.4",), _SAVED, f"{_STATE}Residuals"),
]
