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


class InPieces:
    """An all_gather of INT8 blocks, in pieces that are under way together.

    Args:
        piece: the number of elements of a piece: whole blocks.
        waits: whether calls of several pieces may have async_op=True.
    """

    def __init__(self, piece: int = 4096, waits: bool = True) -> None:
        self.piece = piece
        self.waits = waits

    def finishes(
        self, outputs: list[Tensor], piece: slice, codes: list[Tensor]
    ) -> Callable[[], None]:
        """Return the function that writes a piece of the outputs."""

        def finish() -> None:
            for into, one in zip(outputs, codes, strict=True):
                part = into[piece]
                part.copy_(decode(one, len(part)))

        return finish

    def begun(self, outputs: list[Tensor], flat: Tensor, group: Any) -> Parts:
        """Return the call, whose pieces are all under way."""
        parts = []
        for start in range(0, max(len(flat), 1), self.piece):
            piece = slice(start, start + self.piece)
            code = encode(flat[piece])
            codes = [torch.empty_like(code) for _ in outputs]
            work = dist.all_gather(codes, code, group=group, async_op=True)
            parts.append((work, self.finishes(outputs, piece, codes)))
        return Parts(parts)

    def __call__(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        require_plain(tensor_list, tensor)
        if async_op and not self.waits and tensor.numel() > self.piece:
            raise NotImplementedError("async_op=True is for messages of one piece")
        flat = tensor.detach().reshape(-1).float()
        parts = self.begun([into.view(-1) for into in tensor_list], flat, group)
        return parts if async_op else parts.wait()


class OneScale:
    """An all_gather of bytes with one scale for each message, which is looked for in parts.

    Args:
        part: the number of elements of a part.
    """

    def __init__(self, part: int = 4096) -> None:
        self.part = part

    def largest(self, parts: list[Tensor]) -> float:
        """Return the largest magnitude of a message: NaN if one is."""
        return torch.stack([part.abs().max() for part in parts]).max().item() if parts else 0.0

    def __call__(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        require_plain(tensor_list, tensor)
        flat = tensor.detach().reshape(-1).float()
        count = len(flat)
        largest = self.largest([part for part in flat.split(self.part) if len(part)])
        scale = torch.tensor([largest / 127], dtype=torch.float32)
        scaled = torch.where(scale == 0, 0.0, flat / scale).round()
        small = scaled.nan_to_num(0.0, 0.0, 0.0).to(torch.int8)
        code = torch.cat([small.view(torch.uint8), scale.view(torch.uint8)])
        codes = [torch.empty_like(code) for _ in tensor_list]
        work = dist.all_gather(codes, code, group=group, async_op=True)
        outputs = list(tensor_list)

        def finish() -> None:
            for into, one in zip(outputs, codes, strict=True):
                of_rank = one[count:].clone().view(torch.float32)
                into.copy_((one[:count].view(torch.int8).float() * of_rank).view(into.shape))

        parts = Parts([(work, finish)])
        return parts if async_op else parts.wait()


RIGHT = [
    Right(
        "FeedbackInPieces",
        "collective(all_gather), blocks(int8, size=128), feedback",
        kind="collective",
    ),
    Right("InPieces", "collective(all_gather), blocks(int8, size=128)", kind="collective"),
    Right(
        "InPieces,waits=False", "collective(all_gather), blocks(int8, size=128)", kind="collective"
    ),
    Right(
        "OneScale",
        "collective(all_gather), bounded(relative=0.004, ratio=0.3)",
        kind="collective",
    ),
]
