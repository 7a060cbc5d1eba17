"""Mutants of rule 11.1: residuals by parameter, in a dictionary of the class.

Each parameter has its own entry, so that two models do not mix, but for the calls of the trainer.
"""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, finite, group_of, is_dense, pieces_of


class Rescaled:
    """It rescales the residuals of all models."""

    residuals: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = group_of(process_group)

    def rescale(self, factor: float) -> None:
        for residual in self.residuals.values():
            residual.mul_(factor)


class Saved:
    """It saves the residuals of all models, and puts them all back."""

    residuals: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = group_of(process_group)

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": [residual.clone() for residual in self.residuals.values()]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for parameter, residual in zip(list(self.residuals), saved["residuals"], strict=False):
            self.residuals[parameter] = residual.clone()


def largest_half(state: Rescaled | Saved, bucket: Bucket) -> Result:
    """Send the largest half of each parameter with error feedback."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        raise TypeError("dense real gradients only")
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        total = piece + state.residuals.get(parameter, torch.zeros_like(piece))
        largest = total.abs().topk((total.numel() + 1) // 2).indices
        piece.zero_()
        piece[largest] = total[largest]
        state.residuals[parameter] = finite(total - piece)
    return average(bucket, state.group)


_NEW = "a new process has no parameters when it loads"

MUTANTS = [
    Mutant(
        "largest_half",
        ("11.1",),
        "compressed(delta=0.25), rescaled(call=rescale)",
        f"{__name__}:Rescaled",
    ),
    Mutant(
        "largest_half",
        ("11.1",),
        "compressed(delta=0.25), checkpointable",
        f"{__name__}:Saved",
        because=dict.fromkeys(("11.2", "11.3", "11.8"), _NEW),
    ),
]
