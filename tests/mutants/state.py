"""Section 11 of the rule book: what is kept belongs to a model, and is saved with the state."""

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
    """What tells the parameters of one model apart, in any process: the bucket that each was in at first, and its place there."""
    return [
        _seen.setdefault(parameter, (bucket.index(), place))
        for place, parameter in enumerate(bucket.parameters())
    ]


def _half_at_random(bucket: Bucket, step: int, residuals: dict[Key, torch.Tensor]) -> Result:
    """Send half of the elements, drawn by the step and the parameter, and keep the others for later: right."""
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
    """And keeps residuals: all that there is to save."""

    def __init__(self) -> None:
        super().__init__()
        self.residuals: dict[Key, torch.Tensor] = {}


# 11.1 Two models


def residuals_in_module(state: Steps, bucket: Bucket) -> Result:
    """Keeps residuals in the module, by the place of their parameter."""
    step, state.step = state.step, state.step + bucket.is_last()
    return _half_at_random(bucket, step, _residuals)


class StepsOfAll:
    """A state that counts steps for all states."""

    step = 0


def seeds_by_class(state: StepsOfAll, bucket: Bucket) -> Result:
    """Draws which elements it sends by a count of steps that all states share."""
    generator = seeded(StepsOfAll.step, bucket.index())
    StepsOfAll.step += bucket.is_last()
    return change_gradient(
        bucket, None, lambda grad: grad * (torch.rand(grad.shape, generator=generator) < 0.5) * 2
    )


# 11.2 to 11.4 Checkpoints


def half_at_random(state: Residuals, bucket: Bucket) -> Result:
    """Sends half of the elements, and keeps the others in the state: right, as far as the state is saved."""
    step, state.step = state.step, state.step + bucket.is_last()
    return _half_at_random(bucket, step, state.residuals)


class Saved(Residuals):
    """Saved as a dictionary."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


class ForgetsSteps(Saved):
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict({**saved, "step": 0})


class ForgetsResiduals(Saved):
    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}


class Unsavable(Saved):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "draw": lambda: 0}


class SavedByPlace(Saved):
    """Saves residuals side by side, and takes them up in the order in which a new process sees its parameters."""

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
    """The same, with residuals that were saved side by side."""
    state.latest = _keys(bucket)
    if len(state.loaded):
        parts = state.loaded.split([piece.numel() for piece in pieces_of(bucket)])
        state.residuals.update(zip(state.latest, parts, strict=True))
        state.loaded = torch.zeros(0)
    return half_at_random(state, bucket)


_RESIDUALS, _SAVED = (
    "compressed(delta=0.25), world_only",
    "compressed(delta=0.25), world_only, checkpointable",
)
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
