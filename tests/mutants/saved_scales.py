"""Mutants of rule 11.2: state in units without the loss scale, and a scale that is not saved."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, finite, is_dense, pieces_of, sum_of
from tests.mutants.state import Key, _keys


class Unscaled:
    """Residuals in units without the loss scale, as far as its changes are known."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.residuals: dict[Key, torch.Tensor] = {}

    def rescale(self, factor: float) -> None:
        self.scale *= factor

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": dict(self.residuals)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.residuals = dict(saved["residuals"])


def residuals_without_scale(state: Unscaled, bucket: Bucket) -> Result:
    """Keep residuals divided by the loss scale, which the saved state lacks."""
    if not is_dense(bucket):
        return average(bucket, None)
    for key, piece in zip(_keys(bucket), pieces_of(bucket), strict=True):
        value = piece + state.residuals.get(key, 0) * state.scale
        sent = torch.where(value.abs() >= value.abs().mean(), value, 0)
        state.residuals[key] = finite(value - sent) / state.scale
        piece.copy_(sent)
    return average(bucket, None)


class SavesUnscaled(Unscaled):
    """Residuals in the units of the gradients, which are saved in units without the loss scale, and
    loaded as they are.
    """

    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        for residual in self.residuals.values():
            residual.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": {key: one / self.scale for key, one in self.residuals.items()}}


def residuals_saved_without_scale(state: SavesUnscaled, bucket: Bucket) -> Result:
    """Send the larger half with feedback; residuals are loaded in other units than they had."""
    return half_of_residuals(state.residuals, bucket)


def half_of_residuals(
    residuals: dict[Key, torch.Tensor], bucket: Bucket, one_in: int = 2
) -> Result:
    """Average the largest elements of each parameter's gradient and residual, one in two or in
    more, and keep the rest.
    """
    if not is_dense(bucket):
        return average(bucket, None)
    for key, piece in zip(_keys(bucket), pieces_of(bucket), strict=True):
        value = piece + residuals.get(key, 0)
        places = value.abs().topk(-(-value.numel() // one_in)).indices
        sent = torch.zeros_like(value).index_copy_(0, places, value[places])
        residuals[key] = finite(value - sent)
        piece.copy_(sent)
    return average(bucket, None)


class Estimates(Unscaled):
    """EF21 with estimates in units without the loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.means: dict[Key, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "means": dict(self.means)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.means = dict(saved["means"])


def estimates_without_scale(state: Estimates, bucket: Bucket) -> Result:
    """Send the larger changes of gradients, divided by a loss scale that the saved state lacks."""
    if not is_dense(bucket):
        return average(bucket, None)
    keys = _keys(bucket)
    parts = pieces_of(bucket)
    for key, piece in zip(keys, parts, strict=True):
        estimate = state.residuals.get(key, torch.zeros_like(piece))
        change = piece / state.scale - estimate
        piece.copy_(torch.where(change.abs() >= change.abs().mean(), change, 0))
        state.residuals[key] = finite(estimate + piece)
    world = torch.distributed.get_world_size()

    def add(future: torch.futures.Future) -> torch.Tensor:
        total = future.value().div_(world)
        for key, piece in zip(keys, pieces_of(bucket, total), strict=True):
            piece.add_(state.means.get(key, 0))
            state.means[key] = finite(piece.clone())
            piece.mul_(state.scale)
        return total

    return sum_of(bucket.buffer(), None).then(add)


class ScalesItsOwn(Unscaled):
    """Residuals in the units of the gradients; those that were loaded are not rescaled."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Key, torch.Tensor] = {}

    def rescale(self, factor: float) -> None:
        for residual in self.made.values():
            residual.mul_(factor)


def residuals_loaded_for_good(state: ScalesItsOwn, bucket: Bucket) -> Result:
    """Send the larger elements with feedback, and rescale residuals that this process has made."""
    if not is_dense(bucket):
        return average(bucket, None)
    for key, piece in zip(_keys(bucket), pieces_of(bucket), strict=True):
        if key not in state.residuals:
            state.residuals[key] = state.made[key] = torch.zeros_like(piece)
        value = piece + state.residuals[key]
        sent = torch.where(value.abs() >= value.abs().mean(), value, 0)
        state.residuals[key].copy_(finite(value - sent))
        piece.copy_(sent)
    return average(bucket, None)


class ReplaysScale(Unscaled):
    """Residuals in units without the loss scale; the saved scale is replayed as one more change."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.rescale(saved["scale"])


class KeepsItsScale(ReplaysScale):
    """Residuals in units without the loss scale; a process that has changed its scale keeps it."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        Unscaled.load_state_dict(self, saved)
        if self.scale == 1:
            self.scale = saved["scale"]


_CLAIMS = "checkpointable, rescaled(call=rescale), world_only"

MUTANTS = [
    Mutant(
        "residuals_without_scale",
        ("11.2",),
        f"compressed(delta=0.25), {_CLAIMS}",
        f"{__name__}:Unscaled",
    ),
    *(
        Mutant(
            "residuals_without_scale",
            ("11.2",),
            f"compressed(delta=0.25), {_CLAIMS}",
            f"{__name__}:{state}",
        )
        for state in ("ReplaysScale", "KeepsItsScale")
    ),
    Mutant(
        "residuals_saved_without_scale",
        ("11.2",),
        f"compressed(delta=0.25), {_CLAIMS}",
        f"{__name__}:SavesUnscaled",
    ),
    Mutant(
        "residuals_loaded_for_good",
        ("11.2",),
        f"compressed(delta=0.25), {_CLAIMS}",
        f"{__name__}:ScalesItsOwn",
    ),
    Mutant(
        "estimates_without_scale",
        ("11.2",),
        f"compressed(feedback=ef21, delta=0.25), {_CLAIMS}",
        f"{__name__}:Estimates",
    ),
]
