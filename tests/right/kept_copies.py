"""Hooks that keep copies for a while: of buffers, and of the buckets of calls under way."""

import itertools
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import Bucket, Result


def _group(state: Any) -> dist.ProcessGroup:
    return state if state is not None else dist.group.WORLD


class Buffers:
    """The buffers and the frozen parameters of a model, and copies of them within a step."""

    def __init__(self, process_group: dist.ProcessGroup, model: Any) -> None:
        frozen = (p for p in model.parameters() if not p.requires_grad)
        self.group = process_group
        self.tensors = [*model.buffers(), *frozen]
        self.copies: list[torch.Tensor] = []


def restores_buffers(state: Buffers, bucket: Bucket) -> Result:
    """Copy buffers and frozen parameters at the first bucket, and write the copies back at the
    last one: each in its own dtype, and in place.
    """
    with torch.no_grad():
        if not state.copies:
            state.copies = [tensor.clone() for tensor in state.tensors]
        if bucket.is_last():
            for tensor, copy in zip(state.tensors, state.copies, strict=True):
                tensor.copy_(copy)
            state.copies = []
    buffer = bucket.buffer().div_(state.group.size())
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


_under_way: dict[int, torch.Tensor] = {}
_numbers = itertools.count()


def buffer_by_number_of_call(process_group: Any, bucket: Bucket) -> Result:
    """Keep the buffer in the module until the callback, by a number that each call has alone."""
    group = _group(process_group)
    number = next(_numbers)
    _under_way[number] = bucket.buffer()

    def mean(done: Result) -> torch.Tensor:
        buffer = _under_way.pop(number)
        done.value()  # raises the error of a failed collective
        return buffer.div_(group.size())

    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(mean)


RIGHT = [
    Right("restores_buffers", state=f"{__name__}:Buffers", sections=("2", "4", "9")),
    Right("buffer_by_number_of_call", sections=("2", "11")),
]
