"""Right all_gathers that look at the memory of their outputs: at parts of one buffer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right.collectives_in_pieces import BLOCK, decode, encode
from tests.right.quantized_collectives import Arriving

Tensor = torch.Tensor


def is_row(outputs: list[Tensor], tensor: Tensor) -> bool:
    """Whether outputs lie behind each other, as those of ``list(buffer.chunk(n))`` do."""
    first = outputs[0]
    return tensor.numel() > 0 and all(
        output.is_contiguous()
        and output.shape == tensor.shape
        and output.dtype == first.dtype
        and output.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and output.storage_offset() == first.storage_offset() + place * tensor.numel()
        for place, output in enumerate(outputs)
    )


class RowsAtOnce:
    """An all_gather of INT8 blocks. Outputs that lie behind each other are decoded together.

    Args:
        waits_for_parts: whether outputs may be parts of a buffer in calls with async_op=True.
    """

    def __init__(self, waits_for_parts: bool = True) -> None:
        self.waits_for_parts = waits_for_parts

    def __call__(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        if tensor.dtype != torch.float32:
            raise TypeError(f"expected float32, got {tensor.dtype}")
        if any(into.shape != tensor.shape for into in tensor_list):
            raise ValueError("expected tensors of one shape")
        outputs = list(tensor_list)
        is_part = any(into.untyped_storage().nbytes() != 4 * into.numel() for into in outputs)
        if async_op and is_part and not self.waits_for_parts:
            raise NotImplementedError("async_op=True is for outputs that are no parts of buffers")
        code = encode(tensor.detach().reshape(-1))
        codes = code.new_empty(len(outputs), len(code))
        if is_row(outputs, tensor):
            work = dist.all_gather_into_tensor(codes.view(-1), code, group, async_op=True)
            finish = self.writes_row(outputs, codes)
        else:
            work = dist.all_gather(list(codes), code, group, async_op=True)
            finish = self.writes_each(outputs, codes)
        arriving = Arriving(work, finish)
        return arriving if async_op else arriving.wait()

    def writes_each(self, outputs: list[Tensor], codes: Tensor) -> Callable[[], None]:
        """Return the function that writes outputs one by one."""

        def finish() -> None:
            for into, code in zip(outputs, codes, strict=True):
                into.copy_(decode(code, into.numel()).view(into.shape))

        return finish

    def writes_row(self, outputs: list[Tensor], codes: Tensor) -> Callable[[], None]:
        """Return the function that writes the memory of all outputs."""
        count = outputs[0].numel()
        whole = outputs[0].as_strided((len(outputs), count), (count, 1))

        def finish() -> None:
            whole.copy_(self.values(codes, count))

        return finish

    def values(self, codes: Tensor, count: int) -> Tensor:
        """Return the values of codes, one row for each."""
        blocks = -(-count // BLOCK)
        small = codes[:, : blocks * BLOCK].view(torch.int8).float().view(-1, blocks, BLOCK)
        scales = codes[:, blocks * BLOCK :].contiguous().view(torch.float32)
        return (small * scales[:, :, None]).view(len(codes), -1)[:, :count]


BLOCKS = "collective(all_gather), blocks(int8, size=128)"
RIGHT = [
    Right("RowsAtOnce", BLOCKS, kind="collective"),
    Right("RowsAtOnce,waits_for_parts=False", BLOCKS, kind="collective"),
]
