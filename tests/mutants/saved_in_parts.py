"""Mutants of rules 11.2 and 11.3 whose saved state is wrong for large parameters, or for many."""

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


class Flat:
    """Residuals that are saved under names with numbers; right, but for its subclasses."""

    def __init__(self) -> None:
        self.residuals: dict[Key, torch.Tensor] = {}

    def name(self, place: int) -> str:
        """Return the name that a residual is saved under."""
        return f"residual.{place}"

    def state_dict(self) -> dict[str, Any]:
        pairs = enumerate(self.residuals.values())
        return {
            "keys": list(self.residuals),
            "sizes": [len(residual) for residual in self.residuals.values()],
            "residuals": {self.name(place): residual.clone() for place, residual in pairs},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        keys, sizes = saved["keys"], saved["sizes"]
        parts = self.in_order(saved["residuals"], sizes)
        self.residuals = dict(zip(keys, parts, strict=True))

    def in_order(self, saved: dict[str, torch.Tensor], sizes: list[int]) -> Any:
        """Return the residuals in the order of their keys."""
        return [saved[self.name(place)] for place in range(len(sizes))]


class SortedNames(Flat):
    """Joins the residuals in the order of their names, in which 10 comes before 2."""

    def in_order(self, saved: dict[str, torch.Tensor], sizes: list[int]) -> Any:
        if not saved:
            return []
        return torch.cat([saved[name] for name in sorted(saved)]).split(sizes)


class OneDigit(Flat):
    """Saves residuals under one digit of their numbers: later ones replace the first."""

    def name(self, place: int) -> str:
        return f"residual.{place % 10}"

    def in_order(self, saved: dict[str, torch.Tensor], sizes: list[int]) -> Any:
        found = [saved[self.name(place)] for place in range(len(sizes))]
        pairs = zip(found, sizes, strict=True)
        return [part if len(part) == size else torch.zeros(size) for part, size in pairs]


class FirstEight(Flat):
    """Restores as many residuals as its table has places."""

    def in_order(self, saved: dict[str, torch.Tensor], sizes: list[int]) -> Any:
        found = super().in_order(saved, sizes)
        return [part if place < 8 else torch.zeros_like(part) for place, part in enumerate(found)]


def half_with_feedback(state: InParts, bucket: Bucket) -> Result:
    """Send the larger half with feedback."""
    return half_of_residuals(state.residuals, bucket)


def eighth_with_feedback(state: Flat, bucket: Bucket) -> Result:
    """Send the largest eighth with feedback."""
    return half_of_residuals(state.residuals, bucket, one_in=8)


CLAIMS = "compressed(delta=0.25), world_only, checkpointable"
MUTANTS = [
    *(
        Mutant("half_with_feedback", ("11.2",), CLAIMS, f"{__name__}:{state}")
        for state in (
            "SortedByName",
            "SortedByName,numel=30_000",
            "InHalf,numel=250_000",
            "WholeParts,numel=300_000",
        )
    ),
    *(
        Mutant(
            "eighth_with_feedback",
            ("11.3",),
            "compressed(delta=0.125), world_only, checkpointable",
            f"{__name__}:{state}",
        )
        for state in ("SortedNames", "OneDigit", "FirstEight")
    ),
]
