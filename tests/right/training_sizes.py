"""Right hooks with special ways for large buckets, in odd shapes."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import STATE, Bucket, Result, State, dense

# torch 2.13 deprecates the old names.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SECTIONS = ("22",)


def _group_of(state: Any) -> dist.ProcessGroup:
    return state if state is not None else dist.group.WORLD


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Result:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def _all(sums: list[Result], result: torch.Tensor) -> Result:
    """Return a future of ``result`` that raises the error of the first sum that has one."""

    def finish(fut: Any) -> torch.Tensor:
        for one in fut.value():
            one.value()
        return result

    return torch.futures.collect_all(sums).then(finish)


def chunks(numel: int) -> Callable[[Any, Bucket], Result]:
    """Average chunks of ``numel`` elements, and a shorter one at the end."""

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = dense(bucket)
        group = _group_of(state)
        buffer.div_(group.size())
        return _all([_sum(chunk, group) for chunk in buffer.split(numel)], buffer)

    return hook


def by_parameter(state: Any, bucket: Bucket) -> Result:
    """Average groups of up to 64 tensors, each in a flat copy; large tensors by themselves."""
    buffer = dense(bucket)
    group = _group_of(state)
    sizes = [p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters()]
    pieces = list(buffer.div_(group.size()).split(sizes))
    sums = []
    for begin in range(0, len(pieces), 64):
        some = pieces[begin : begin + 64]
        flat = torch.cat(some) if len(some) > 1 else some[0]

        def copied(fut: Result, some: list[torch.Tensor] = some) -> torch.Tensor:
            flat = fut.value()
            for piece, mean in zip(some, flat.split([len(one) for one in some]), strict=True):
                if piece.data_ptr() != mean.data_ptr():
                    piece.copy_(mean)
            return flat

        sums.append(_sum(flat, group).then(copied))
    return _all(sums, buffer)


def halves_when_large(state: Any, bucket: Bucket) -> Result:
    """Average two parts of a bucket above 2**20 elements, and smaller ones at once."""
    buffer = dense(bucket)
    group = _group_of(state)
    buffer.div_(group.size())
    if len(buffer) <= 1 << 20:
        return _sum(buffer, group)
    middle = len(buffer) // 2
    return _all([_sum(buffer[:middle], group), _sum(buffer[middle:], group)], buffer)


def shards(state: Any, bucket: Bucket) -> Result:
    """Reduce equal shards of a padded bucket to their owners, and gather them."""
    buffer = dense(bucket)
    group = _group_of(state)
    size = group.size()
    width = math.ceil(len(buffer) / size)
    padded = torch.zeros(width * size, dtype=buffer.dtype)
    padded[: len(buffer)] = buffer
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    mine = received.view(size, width).sum(0).div_(size)
    gathered = torch.empty_like(padded)
    work = _gather_into(gathered, mine, group=group, async_op=True)
    numel = len(buffer)
    return work.get_future().then(lambda fut: (fut.value(), gathered[:numel].clone())[1])


def top_k_in_int64(state: State, bucket: Bucket) -> Result:
    """Gather the larger half of the bucket's elements, with indices in int64 and feedback."""
    buffer = dense(bucket)
    group = state.group
    total = state.residuals.of(bucket) + buffer
    indices = total.abs().topk(math.ceil(len(total) / 2)).indices
    values = total[indices]
    total[indices] = 0
    state.residuals.keep(bucket, total)
    all_values = [torch.empty_like(values) for _ in range(group.size())]
    all_indices = [torch.empty_like(indices) for _ in range(group.size())]
    works = [
        dist.all_gather(all_values, values, group=group, async_op=True),
        dist.all_gather(all_indices, indices, group=group, async_op=True),
    ]

    def scatter(done: Any) -> torch.Tensor:
        for future in done.value():
            future.value()
        result = torch.zeros_like(total)
        for some, places in zip(all_values, all_indices, strict=True):
            result.index_add_(0, places, some)
        return result.div_(group.size()).to(buffer.dtype)

    return torch.futures.collect_all([work.get_future() for work in works]).then(scatter)


RIGHT = (
    Right("chunks,numel=1_000_003", sections=_SECTIONS),
    # Each chunk takes some memory of the backend's and of Python's, until pools are filled.
    Right("chunks,numel=262_144", sections=(*_SECTIONS, "9")),
    Right("by_parameter", sections=_SECTIONS),
    Right("halves_when_large", sections=_SECTIONS),
    Right("shards", sections=_SECTIONS),
    Right("top_k_in_int64", "compressed(delta=0.25)", STATE, sections=_SECTIONS),
)
