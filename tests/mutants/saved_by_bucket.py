"""Mutants of rule 11.3 that look for a saved residual in the bucket that it was saved from.

A new process has one bucket until DDP rebuilds it. In the first process that falls into the exact
steps, in which there are no residuals.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, finite, is_dense, pieces_of

EXACT = 3
Kept = dict[int, dict[str, torch.Tensor]]


class ByBucket:
    """Residuals by the names of parameters, for each bucket by its number."""

    def __init__(self, process_group: dist.ProcessGroup, model: Any) -> None:
        self.group = process_group
        self.names = {parameter: name for name, parameter in model.module.named_parameters()}
        self.step = 0
        self.kept: Kept = {}

    def keep(self, number: int, residuals: dict[str, torch.Tensor]) -> None:
        self.kept[number] = residuals

    def count(self, bucket: Bucket) -> None:
        self.step += bucket.is_last()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "kept": _copies(self.kept)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]
        self.kept = _copies(saved["kept"])


class Swapped(ByBucket):
    """Takes the residuals of a step when it ends, and forgets those that no bucket has used."""

    def __init__(self, process_group: dist.ProcessGroup, model: Any) -> None:
        super().__init__(process_group, model)
        self.of_step: Kept = {}

    def keep(self, number: int, residuals: dict[str, torch.Tensor]) -> None:
        self.of_step[number] = residuals

    def count(self, bucket: Bucket) -> None:
        super().count(bucket)
        if bucket.is_last():
            self.kept = self.of_step
            self.of_step = {}


def _copies(kept: Kept) -> Kept:
    return {
        number: {name: residual.clone() for name, residual in residuals.items()}
        for number, residuals in kept.items()
    }


def quarter_by_bucket(state: ByBucket, bucket: Bucket) -> Result:
    """Send the largest quarter of each parameter with feedback, after the exact steps."""
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    if state.step >= EXACT:
        before = state.kept.get(bucket.index(), {})
        left = {}
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
            name = state.names[parameter]
            total = piece + before[name] if name in before else piece.clone()
            places = total.abs().topk(-(-total.numel() // 4)).indices
            piece.zero_().index_copy_(0, places, total[places])
            left[name] = finite(total - piece)
        state.keep(bucket.index(), left)
    state.count(bucket)
    return average(bucket, state.group)


MUTANTS = [
    Mutant(
        "quarter_by_bucket",
        ("11.3",),
        f"compressed(delta=0.25), warmup({EXACT}), checkpointable",
        f"{__name__}:{state}",
    )
    for state in ("ByBucket", "Swapped")
]
