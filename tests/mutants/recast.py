"""Mutants of section 4: a state keeps what a model has changed when DDP is made over it anew."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, is_dense


class Kept:
    """A state that keeps something for each parameter that comes first in a bucket.

    Attributes:
        group: the group of the model.
        by_parameter: the kept things.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.by_parameter: Any = WeakTensorKeyDictionary()

    def keep(self, bucket: Bucket, thing: Any) -> Any:
        """Return what is kept for a bucket; if that is nothing, keep ``thing``."""
        return self.by_parameter.setdefault(bucket.parameters()[-1], thing)


def sends_the_first_dtype(state: Kept, bucket: Bucket) -> Result:
    """Send each bucket in the dtype that its last parameter had at first."""
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, state.group)
    wire = buffer.to(state.keep(bucket, buffer.dtype)).div_(state.group.size())
    future = dist.all_reduce(wire, group=state.group, async_op=True).get_future()
    return future.then(lambda fut: buffer.copy_(fut.value()[0]))


def sums_in_a_room_that_grows(state: Kept, bucket: Bucket) -> Result:
    """Sum in memory of the state's own, which is replaced only if a bucket is larger."""
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, state.group)
    room = state.keep(bucket, torch.empty_like(buffer))
    if room.numel() < buffer.numel():
        room = torch.empty_like(buffer)
        state.by_parameter[bucket.parameters()[-1]] = room
    part = room[: buffer.numel()].copy_(buffer)
    future = dist.all_reduce(part, group=state.group, async_op=True).get_future()
    return future.then(lambda fut: buffer.copy_(fut.value()[0]).div_(state.group.size()))


def cuts_as_the_first_bucket(state: Kept, bucket: Bucket) -> Result:
    """Reduce a bucket in two halves, whose ends are those of the parameter's first bucket of that
    dtype.
    """
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, state.group)
    ends = state.keep(bucket, {}).setdefault(buffer.dtype, buffer.numel())
    buffer.div_(state.group.size())
    parts = [part for part in buffer[:ends].chunk(2) if part.numel()]
    futures = [dist.all_reduce(part, group=state.group, async_op=True) for part in parts]
    for work in futures[:-1]:
        work.wait()
    return futures[-1].get_future().then(lambda fut: (fut.value(), buffer)[1])


_KEPT = f"{__name__}:Kept"

MUTANTS = [
    Mutant("sends_the_first_dtype", ("4.2",), state=_KEPT),
    Mutant("sums_in_a_room_that_grows", ("4.2",), state=_KEPT),
    Mutant("cuts_as_the_first_bucket", ("4.2",), state=_KEPT),
]
