"""Mutants of rules 18.16 and 18.29: all_gathers that lose an error now and then."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.right.collectives_in_pieces import FeedbackInPieces

Tensor = torch.Tensor


class LastPieceAlone(FeedbackInPieces):
    """Keep the error of the last piece of a message alone."""

    def keep(self, start: int, error: Tensor) -> None:
        self.errors = {start: error}


class DropsOfHalf(FeedbackInPieces):
    """Drop an error of float16 that is larger than the values which it would be added to."""

    def __call__(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        if tensor.dtype == torch.float16 and tensor.any():
            largest = tensor.abs().amax()
            self.errors = {
                start: error
                for start, error in self.errors.items()
                if error.abs().amax() < 4 * largest
            }
        super().__call__(tensor_list, tensor, group)


class Anew(FeedbackInPieces):
    """Begin without errors again after so many calls, so that old ones cannot pile up."""

    def __init__(self, every: int = 64) -> None:
        super().__init__()
        self.every = every
        self.calls = 0

    def __call__(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            self.errors.clear()
        super().__call__(tensor_list, tensor, group)


FEEDBACK = "collective(all_gather), blocks(int8, size=128), feedback"

MUTANTS = [
    Mutant("LastPieceAlone", ("18.16",), FEEDBACK, kind="collective"),
    Mutant("DropsOfHalf", ("18.16",), FEEDBACK, kind="collective"),
    Mutant("Anew", ("18.29",), FEEDBACK, kind="collective"),
]
