"""Mutants of rule 11.5: ranks vote on what is unused, but not the right ones, or not for long."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result
from tests.mutants.residuals import Residuals, halves_with_feedback


class VotesOnWorld(Residuals):
    """Lets all ranks of WORLD vote under find_unused_parameters, of which some train another
    model."""

    def __init__(
        self, process_group: dist.ProcessGroup | None, model: DistributedDataParallel
    ) -> None:
        super().__init__(process_group)
        self.votes = model.find_unused_parameters

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        used = torch.tensor([float(part.any()) for part in parts])
        if self.votes:
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
        return [self.votes and not flag for flag in used.tolist()]


class VotesAtFirst(Residuals):
    """Votes no more if all parameters were used in the first 50 buckets."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        self.votes = 0
        self.has_rests = False

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        self.votes += 1
        if self.votes > 50 and not self.has_rests:
            return [False] * len(parts)
        unused = super().is_unused(parts)
        self.has_rests = self.has_rests or any(unused)
        return unused


def votes_otherwise(state: Any, bucket: Bucket) -> Result:
    """Vote on what is unused with other ranks than those of the group, or in the first steps."""
    return halves_with_feedback(state, bucket)


MUTANTS = [
    Mutant(
        "votes_otherwise", ("11.5",), "compressed(delta=0.25), keeps_unused", f"{__name__}:{state}"
    )
    for state in ("VotesOnWorld", "VotesAtFirst")
]
