"""Mutants of rule 11.2 whose saved state is wrong for large parameters alone."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result
from tests.mutants.saved_scales import half_of_residuals
from tests.mutants.state import Key


class InParts:
    """Residuals that are saved in parts; right, but for its subclasses.

    Args:
        numel: the elements of a part.
    """

    def __init__(self, numel: int = 65_536) -> None:
        self.numel = numel
        self.residuals: dict[Key, torch.Tensor] = {}

    def parts_of(self, residual: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of a residual by the names that they are saved under."""
        parts = residual.split(self.numel)
        return {f"part.{place}": part.clone() for place, part in enumerate(parts)}

    def joined(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the residual that such parts make."""
        return torch.cat([parts[f"part.{place}"] for place in range(len(parts))])

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": {key: self.parts_of(one) for key, one in self.residuals.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.residuals = {key: self.joined(parts) for key, parts in saved["residuals"].items()}


class SortedByName(InParts):
    """Joins parts in the order of their names, in which 10 comes before 2."""

    def joined(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([parts[name] for name in sorted(parts)])


class InHalf(InParts):
    """Saves residuals of more than one part in bfloat16."""

    def parts_of(self, residual: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(residual) <= self.numel:
            return super().parts_of(residual)
        return super().parts_of(residual.bfloat16().to(residual.dtype))


class WholeParts(InParts):
    """Fills the last, shorter part with zeros in place of its values."""

    def parts_of(self, residual: torch.Tensor) -> dict[str, torch.Tensor]:
        whole = len(residual) // self.numel * self.numel
        kept = residual.clone()
        kept[whole or len(kept) :] = 0
        return super().parts_of(kept)


def half_with_feedback(state: InParts, bucket: Bucket) -> Result:
    """Send the larger half with feedback."""
    return half_of_residuals(state.residuals, bucket)


MUTANTS = [
    Mutant(
        "half_with_feedback",
        ("11.2",),
        "compressed(delta=0.25), world_only, checkpointable",
        f"{__name__}:{state}",
    )
    for state in (
        "SortedByName",
        "SortedByName,numel=30_000",
        "InHalf,numel=250_000",
        "WholeParts,numel=300_000",
    )
]
