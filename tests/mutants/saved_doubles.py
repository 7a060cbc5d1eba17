"""Mutants of rule 11.8: residuals of float64 that lose bits when they are saved or loaded."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, finite, is_dense, pieces_of
from tests.mutants.state import Key, _keys


class Residuals:
    """Residuals in float32, and those of float64 in float64; they are saved as they are."""

    def __init__(self) -> None:
        self.of: dict[Key, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {key: self.saved(residual) for key, residual in self.of.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.of = {key: self.loaded(residual) for key, residual in saved.items()}

    def saved(self, residual: torch.Tensor) -> Any:
        """Return what a checkpoint has of a residual."""
        return residual.clone()

    def loaded(self, saved: Any) -> torch.Tensor:
        """Return the residual of a checkpoint."""
        return saved.clone()


class IntoFloat32(Residuals):
    """Residuals that are loaded into new tensors of the default dtype."""

    def loaded(self, saved: Any) -> torch.Tensor:
        return torch.zeros(saved.shape).copy_(saved)


class InDigits(Residuals):
    """Residuals that are saved as text with nine digits, which float32 needs."""

    def saved(self, residual: torch.Tensor) -> Any:
        return " ".join(f"{value:.9g}" for value in residual.tolist()), str(residual.dtype)

    def loaded(self, saved: Any) -> torch.Tensor:
        digits, dtype = saved
        values = [float(word) for word in digits.split()]
        return torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch.")))


def larger_half(state: Residuals, bucket: Bucket) -> Result:
    """Send the larger half with feedback, in float32 or float64."""
    if not is_dense(bucket):
        return average(bucket, None)
    wide = torch.promote_types(bucket.buffer().dtype, torch.float32)
    for key, piece in zip(_keys(bucket), pieces_of(bucket), strict=True):
        value = piece.to(wide) + state.of.get(key, 0)
        places = value.abs().topk(-(-value.numel() // 2)).indices
        piece.copy_(torch.zeros_like(value).index_copy_(0, places, value[places]))
        state.of[key] = finite(value - piece)
    return average(bucket, None)


_CLAIMS = "compressed(delta=0.25), world_only, checkpointable"

MUTANTS = [
    Mutant("larger_half", ("11.8",), _CLAIMS, f"{__name__}:{name}")
    for name in ("IntoFloat32", "InDigits")
]
