"""Mutants of rule 15.44: sharded optimizers that clip gradients by a wrong norm."""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.right.optimizer_wrappers import ClipsSlices


class ClipsByItsOwnShare(ClipsSlices):
    """Take the norm of this rank's slices for that of all gradients."""

    def norm_of_all(self, squares: torch.Tensor) -> torch.Tensor:
        return squares.sqrt()


class AddsNorms(ClipsSlices):
    """Add up the norms of all ranks, in place of their squares."""

    def norm_of_all(self, squares: torch.Tensor) -> torch.Tensor:
        norm = squares.sqrt()
        dist.all_reduce(norm, group=self.group)
        return norm


class ClipsByTheLargestNorm(ClipsSlices):
    """Take the largest of the ranks' norms for that of all gradients."""

    def norm_of_all(self, squares: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(squares, dist.ReduceOp.MAX, group=self.group)
        return squares.sqrt()


class ReturnsItsOwnNorm(ClipsSlices):
    """Clip by the norm of all gradients, and return that of this rank's slices."""

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        super().clip_grad_norm(max_norm, norm_type)
        return self.own

    def norm_of_all(self, squares: torch.Tensor) -> torch.Tensor:
        self.own = squares.sqrt()
        return super().norm_of_all(squares)


class ClipsFirstGroups(ClipsSlices):
    """Clip the gradients of the parameters that the first call has found, by their norm."""

    first: int | None = None

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        self.first = self.first or len(self.wholes)
        every = self.wholes
        self.wholes = every[: self.first]
        norm = super().clip_grad_norm(max_norm, norm_type)
        self.wholes = every
        return norm


MUTANTS = [
    Mutant(name, ("15.44",), kind="optimizer")
    for name in (
        *("ClipsByItsOwnShare", "AddsNorms", "ClipsByTheLargestNorm"),
        *("ReturnsItsOwnNorm", "ClipsFirstGroups"),
    )
]
