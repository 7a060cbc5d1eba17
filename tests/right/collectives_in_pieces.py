"""Right quantized collectives that send large messages in pieces, to bound their scratch memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right

Tensor = torch.Tensor
BLOCK = 128


def encode(flat: Tensor) -> Tensor:
    """Return bytes and scales of blocks as one tensor of bytes."""
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    small = torch.where(scales == 0, 0.0, blocks / scales).round().nan_to_num().to(torch.int8)
    return torch.cat([small.view(torch.uint8).reshape(-1), scales.view(-1).view(torch.uint8)])


def decode(code: Tensor, count: int) -> Tensor:
    """Return the values of a code."""
    rows = -(-count // BLOCK)
    small = code[: rows * BLOCK].view(torch.int8).float().view(rows, BLOCK)
    scales = code[rows * BLOCK :].clone().view(torch.float32)
    return (small * scales[:, None]).view(-1)[:count]


def require_plain(tensor_list: list[Tensor], tensor: Tensor) -> None:
    """Refuse what pieces cannot be cut from."""
    if not tensor.is_floating_point():
        raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
    if any(into.shape != tensor.shape for into in tensor_list):
        raise ValueError("expected tensors of one shape")
    if not all(one.is_contiguous() for one in (tensor, *tensor_list)):
        raise ValueError("expected contiguous tensors")


class FeedbackInPieces:
    """An all_gather of INT8 blocks with an error for each piece. It takes no async_op.

    Args:
        piece: the number of elements of a piece: whole blocks.
    """

    def __init__(self, piece: int = 4096) -> None:
        self.piece = piece
        self.errors: dict[int, Tensor] = {}

    def keep(self, start: int, error: Tensor) -> None:
        """Keep the error of a piece for the next call."""
        self.errors[start] = error

    def __call__(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        require_plain(tensor_list, tensor)
        flat = tensor.detach().reshape(-1).float()
        for start in range(0, max(len(flat), 1), self.piece):
            fed = flat[start : start + self.piece]
            if start in self.errors:
                fed = fed + self.errors[start]
            code = encode(fed)
            lost = fed - decode(code, len(fed))
            self.keep(start, torch.where(lost.isfinite(), lost, 0.0))
            codes = [torch.empty_like(code) for _ in tensor_list]
            dist.all_gather(codes, code, group=group)
            for into, one in zip(tensor_list, codes, strict=True):
                into.view(-1)[start : start + self.piece].copy_(decode(one, len(fed)))


class Parts:
    """A call whose parts are waited for one after the other."""

    def __init__(self, parts: list[tuple[Any, Callable[[], None]]]) -> None:
        self.parts = parts

    def wait(self) -> None:
        for work, finish in self.parts:
            work.wait()
            finish()


RIGHT = [
    Right(
        "FeedbackInPieces",
        "collective(all_gather), blocks(int8, size=128), feedback",
        kind="collective",
    ),
]
