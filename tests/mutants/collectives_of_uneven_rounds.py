"""Mutants of rule 18.24: exchanges that are right for even parts, for float32 or on WORLD."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.right.collectives_of_uneven_parts import LISTS, SINGLE, InRounds, Padded, Single

Tensor = torch.Tensor


class OffsetsInTheDtype(Single):
    """Make offsets by new_tensor(), which keeps the dtype of the messages: beyond 256 rows they are
    rounded in bfloat16.
    """

    def starts(self, rows: list[int], output: Tensor) -> list[int]:
        made: list[int] = output.new_tensor([0, *rows]).cumsum(0)[:-1].long().tolist()
        return made


class RoundsOfItsOwn(InRounds):
    """Take as many rounds as the rank's own longest part needs."""

    def agreed(self, longest: int, group: Any) -> int:
        return longest


class AgreesOnWorld(Padded):
    """Agree on the longest code without the group, if parts are uneven for some rank of it."""

    def agreed(self, longest: int, group: Any) -> int:
        own = torch.tensor([longest, -longest])
        dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
        largest, least = own.tolist()
        return super().agreed(longest, None if largest != -least else group)


MUTANTS = [
    Mutant("OffsetsInTheDtype", ("18.24",), SINGLE, kind="collective"),
    Mutant("RoundsOfItsOwn", ("18.24",), SINGLE, hangs=True, kind="collective"),
    Mutant("AgreesOnWorld", ("18.24",), LISTS, hangs=True, kind="collective"),
]
