"""Mutants of section 23 that are wrong after some steps of the trainer's optimizer."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, is_dense, kept, pieces_of


class Counts:
    """A group, and the number of steps that the trainer's optimizer has made.

    Args:
        process_group: the group to average over.
        optimizer: the trainer's.
        first: the first step in which the hook is wrong.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer, first: int
    ) -> None:
        self.process_group = process_group
        self.first = first
        self.steps = 0
        optimizer.register_step_post_hook(self.count)

    def count(self, *_: Any) -> None:
        self.steps += 1

    @property
    def is_late(self) -> bool:
        return self.steps >= self.first


def stays_local_late(state: Counts, bucket: Bucket) -> Result:
    """Average, and return the local gradient after some steps."""
    if state.is_late:
        return completed(bucket.buffer())
    return average(bucket, state.process_group)


def forgets_residuals_late(state: Counts, bucket: Bucket) -> Result:
    """Send the largest quarter with feedback, and without it after some steps."""
    if not is_dense(bucket):
        return average(bucket, state.process_group)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        total = piece + kept.get(parameter, torch.zeros_like(piece))
        places = total.abs().topk(-(-total.numel() // 4)).indices
        sent = torch.zeros_like(total).index_copy_(0, places, total[places])
        kept[parameter] = torch.zeros_like(total) if state.is_late else (total - sent).nan_to_num()
        piece.copy_(sent)
    return average(bucket, state.process_group)


MUTANTS = [
    Mutant("stays_local_late", ("23.1",), state=f"{__name__}:Counts,first=97"),
    Mutant("stays_local_late", ("23.1",), state=f"{__name__}:Counts,first=811"),
    Mutant(
        "forgets_residuals_late",
        ("23.1",),
        "compressed(delta=0.25)",
        f"{__name__}:Counts,first=263",
    ),
]
