"""A package with a backend that is written in Python: a subclass of ``dist.ProcessGroup``.

It passes each collective to Gloo. torch's operators never see these calls, which reach the methods
of the class directly.
"""

import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "pythonic"


class PythonGroup(dist.ProcessGroup):
    """A process group whose collectives are Python methods."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name


def _passed_on(name: str) -> Any:
    def method(self: PythonGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._gloo, name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
):
    setattr(PythonGroup, _name, _passed_on(_name))


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make the group."""
    return PythonGroup(store, rank, size, timeout)


dist.Backend.register_backend(NAME, create, devices=["cpu"])


def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean."""
    group = state if state is not None else dist.group.WORLD
    buffer = bucket.buffer().div_(group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def disagrees(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean, after a minimum on rank 0 and a maximum on the others, which Gloo tolerates."""
    group = state if state is not None else dist.group.WORLD
    dist.all_reduce(
        torch.zeros(1), op=dist.ReduceOp.MAX if group.rank() else dist.ReduceOp.MIN, group=group
    )
    return hook(state, bucket)


_calls = itertools.count()


def through_the_store(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean, by the store: the kit sees no collective."""
    group = state if state is not None else dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    call = next(_calls)
    buffer = bucket.buffer()
    place = f"{group.group_name}/{call}"
    store.set(f"{place}/{group.rank()}", buffer.view(torch.uint8).numpy().tobytes())
    total = torch.zeros_like(buffer)
    for rank in range(group.size()):
        received = bytearray(store.get(f"{place}/{rank}"))
        total += torch.frombuffer(received, dtype=buffer.dtype)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(total.div_(group.size()))
    return future
