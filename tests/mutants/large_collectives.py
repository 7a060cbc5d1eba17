"""Mutants of rules 18.11 and 18.21: another path for large messages, which is right for
contiguous tensors with memory of their own, on WORLD.
"""

from typing import Any

import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import Tensor
from tests.mutants.summing_collectives import Halves

LARGE = 60_000  # elements


class PiecesOfACopy(Halves):
    """Reduce large messages in pieces of reshape(-1), which may be a copy."""

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        for piece in tensor.reshape(-1).split(LARGE) if tensor.numel() > LARGE else [tensor]:
            super().reduce(piece, size, group)


class PiecesOnWorld(Halves):
    """Reduce the pieces of large messages on WORLD, whatever the group is."""

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        if tensor.numel() <= LARGE:
            super().reduce(tensor, size, group)
            return
        flat = tensor.contiguous().view(-1)
        for piece in flat.split(LARGE):
            super().reduce(piece, dist.get_world_size(), None)
        tensor.copy_(flat.view(tensor.shape))


class SumsInTheOutput(Halves):
    """Clear the output before the parts of a large message are read; it may be one of them."""

    def parts(self, given: Any, output: Tensor, size: int) -> list[Tensor]:
        parts = super().parts(given, output, size)
        if output.numel() > LARGE:
            output.zero_()
        return parts


def _named(name: str, number: str, func: str = "all_reduce") -> Mutant:
    return Mutant(f"{name},func={func},qtype=FP16", (number,), kind="collective")


MUTANTS = [
    _named("PiecesOfACopy", "18.21"),
    _named("PiecesOnWorld", "18.11"),
    _named("SumsInTheOutput", "18.21", "reduce_scatter_tensor"),
    _named("SumsInTheOutput", "18.21", "reduce_scatter"),
]
