"""Mutants of rules 18.6, 18.16, 18.21, 18.22 and 18.29: all_gathers that send large messages in
pieces, or look for a scale in parts of them.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.right.collectives_in_pieces import (
    FeedbackInPieces,
    InPieces,
    OneScale,
    Parts,
    decode,
    encode,
    require_plain,
)

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


class BindsLate(InPieces):
    """Write each piece by a function that reads the loop's variables when it is called: in an
    asynchronous call that is after the last piece.
    """

    def __call__(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        require_plain(tensor_list, tensor)
        outputs = [into.view(-1) for into in tensor_list]
        flat = tensor.detach().reshape(-1).float()
        parts = []
        for start in range(0, max(len(flat), 1), self.piece):
            piece = flat[start : start + self.piece]
            code = encode(piece)
            codes = [torch.empty_like(code) for _ in tensor_list]
            work = dist.all_gather(codes, code, group=group, async_op=True)

            def finish() -> None:
                for into, one in zip(outputs, codes, strict=True):
                    into[start : start + self.piece].copy_(decode(one, len(piece)))

            parts.append((work, finish))
            if not async_op:
                work.wait()
                finish()
        return Parts(parts) if async_op else None


class CopiesOfHalf(InPieces):
    """Write the result of an asynchronous call in another dtype to a float32 copy of the output."""

    def __call__(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op:
            tensor_list = [into.float() for into in tensor_list]
        return super().__call__(tensor_list, tensor, group, async_op)


class LosesNan(OneScale):
    """Compare the parts' largest magnitudes by Python's max(), which drops a NaN unless it comes
    first.
    """

    def largest(self, parts: list[Tensor]) -> float:
        return max([part.abs().max().item() for part in parts], default=0.0)


FEEDBACK = "collective(all_gather), blocks(int8, size=128), feedback"
BLOCKS = "collective(all_gather), blocks(int8, size=128)"
BOUNDED = "collective(all_gather), bounded(relative=0.004, ratio=0.3)"

MUTANTS = [
    Mutant("LastPieceAlone", ("18.16",), FEEDBACK, kind="collective"),
    Mutant("DropsOfHalf", ("18.16",), FEEDBACK, kind="collective"),
    Mutant("Anew", ("18.29",), FEEDBACK, kind="collective"),
    Mutant(
        "BindsLate",
        ("18.21",),
        BLOCKS,
        because={"18.6": "large messages of other dtypes are in pieces, too"},
        kind="collective",
    ),
    Mutant("CopiesOfHalf", ("18.6",), BLOCKS, kind="collective"),
    Mutant("LosesNan", ("18.22",), BOUNDED, kind="collective"),
]
