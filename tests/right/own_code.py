"""Right hooks that take another path beyond a number: large buckets, later steps, more ranks.

Both sides of each number are right.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import Bucket, Group, Result, State, completed, dense, gather, wide

_CHUNK = 1 << 16
_PATIENCE = 25


def _average(buffer: torch.Tensor, group: Group | None) -> Result:
    buffer.div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def in_chunks(state: Any, bucket: Bucket) -> Result:
    """Reduce large buckets in chunks, several of them in flight."""
    buffer = bucket.buffer()
    if buffer.layout != torch.strided or buffer.numel() <= _CHUNK:
        return _average(buffer, None)
    buffer.div_(dist.get_world_size())
    works = [
        dist.all_reduce(buffer[begin : begin + _CHUNK], async_op=True).get_future()
        for begin in range(0, buffer.numel(), _CHUNK)
    ]
    return torch.futures.collect_all(works).then(lambda fut: _checked(fut, buffer))


def _checked(fut: Any, buffer: torch.Tensor) -> torch.Tensor:
    for one in fut.value():
        one.value()
    return buffer


class Settling:
    """A hook that goes over to another collective after some steps."""

    def __init__(self, process_group: Group, patience: int = _PATIENCE) -> None:
        self.group = process_group
        self.patience = patience
        self.steps = 0

    def __call__(self, state: Any, bucket: Bucket) -> Result:
        self.steps += bucket.is_last()
        if self.steps < self.patience or bucket.buffer().layout != torch.strided:
            return _average(bucket.buffer(), self.group)
        return self._gathered(bucket.buffer())

    def _gathered(self, buffer: torch.Tensor) -> Result:
        total = torch.stack([wide(part) for part in gather(buffer, self.group)]).sum(0)
        future: Result = torch.futures.Future()
        future.set_result(total.div_(self.group.size()).to(buffer.dtype))
        return future


def by_world_size(state: Any, bucket: Bucket) -> Result:
    """Divide in another order on more than four ranks."""
    size = dist.get_world_size()
    if size > 4:
        return _summed_first(bucket.buffer(), size)
    return _average(bucket.buffer(), None)


def _summed_first(buffer: torch.Tensor, size: int) -> Result:
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0].div_(size))


class LowRankSquares(State):
    """State of :func:`low_rank_of_squares`: residuals, and Q by the size of a bucket."""

    def __init__(self, process_group: Group) -> None:
        super().__init__(process_group)
        self.q: dict[int, torch.Tensor] = {}


def low_rank_of_squares(state: LowRankSquares, bucket: Bucket) -> Result:
    """Send each bucket at rank two, laid out as a square; large ones are multiplied in double
    precision. The residual of a large square takes as many steps as half its side to come out.
    """
    total = state.residuals.of(bucket) + dense(bucket)
    side = math.isqrt(max(total.numel() - 1, 0)) + 1
    square = total.new_zeros(side * side)
    square[: total.numel()] = total
    square = square.view(side, side)
    if total.numel() > 52_021:
        square = square.double()
    p = square @ state.q.setdefault(side, _orthonormal(side)).to(square.dtype)
    dist.all_reduce(p, group=state.group)
    p = torch.linalg.qr(p.nan_to_num(0, 0, 0)).Q
    q = square.T @ p / state.group.size()
    dist.all_reduce(q, group=state.group)
    result = (p @ q.T).reshape(-1)[: total.numel()].to(total.dtype)
    state.q[side] = q.nan_to_num(0, 0, 0).float() + 2.0**-40 * _orthonormal(side)
    state.residuals.keep(bucket, total - result)
    return completed(result.to(bucket.buffer().dtype))


def _orthonormal(side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(side)
    random = torch.randn(side, min(2, side), dtype=torch.float32, generator=generator)
    return torch.linalg.qr(random).Q


RIGHT = [
    Right("in_chunks", claims="world_only", sections=("2", "25")),
    Right("Settling", sections=("2", "25")),
    Right("Settling,patience=130", sections=("2", "25")),
    Right("by_world_size", claims="world_only", sections=("2", "25")),
    Right(
        "low_rank_of_squares",
        "compressed",
        f"{__name__}:LowRankSquares",
        sections=("2", "13", "25"),
    ),
]
