"""Right quantized collectives that refuse some asynchronous calls alone: those of uneven parts, or
those that come while another one is under way.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right.quantized_collectives import Arriving

Tensor = torch.Tensor
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def _require_float32(tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise TypeError(f"expected float32, got {tensor.dtype}")


class PlannedExchange:
    """An all_to_all_single of float16, with buffers for each way to divide the rows.

    Calls with async_op=True have parts of one size.
    """

    def __init__(self) -> None:
        self.plans: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        _require_float32(input)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        sizes = [output_split_sizes, input_split_sizes]
        if async_op and any(sizes):
            raise NotImplementedError("async_op=True is for parts of one size")
        width = max(tensor[:1].numel() for tensor in (output, input))
        splits = [rows and [n * width for n in rows] for rows in sizes]
        key = (group, output.shape, input.shape, *(rows and tuple(rows) for rows in sizes))
        if async_op or key not in self.plans:
            rooms = [torch.empty(one.numel(), dtype=torch.float16) for one in (output, input)]
            received, sent = rooms
            if not async_op:
                self.plans[key] = received, sent
        else:
            received, sent = self.plans[key]
        sent.copy_(input.reshape(-1))
        work = dist.all_to_all_single(received, sent, *splits, group, async_op=True)
        arriving = Arriving(work, lambda: output.copy_(received.view(output.shape)))
        return arriving if async_op else arriving.wait()


class OneAtATime:
    """An all_reduce that sends float16 and adds in float32, in sums and averages.

    It has room for one call. Another one is refused until that has been waited for.
    """

    def __init__(self) -> None:
        self.is_under_way = False

    def __call__(
        self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        _require_float32(tensor)
        if op not in (SUM, AVG):
            raise ValueError("sums and averages only")
        if dist.get_rank(group) < 0:
            return None
        if self.is_under_way:
            raise RuntimeError("a call is under way")
        code = tensor.reshape(-1).half()
        codes = [torch.empty_like(code) for _ in range(dist.get_world_size(group))]
        work = dist.all_gather(codes, code, group, async_op=True)
        self.is_under_way = True

        def finish() -> None:
            total = torch.stack(codes).float().sum(0)
            if op == AVG:
                total /= len(codes)
            tensor.copy_(total.view(tensor.shape))
            self.is_under_way = False

        arriving = Arriving(work, finish)
        return arriving if async_op else arriving.wait()


RIGHT = [
    Right("PlannedExchange", "collective(all_to_all_single), rounded(float16)", kind="collective"),
    Right("OneAtATime", "collective(all_reduce), rounded(float16)", kind="collective"),
]
