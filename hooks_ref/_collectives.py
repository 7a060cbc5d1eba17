"""Collectives under one name in every torch, and continuations of several collectives.

Source of what futures and streams promise: torch documentation, torch.futures.Future, ``wait``,
``value`` and ``then``; torch.Tensor.record_stream.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Gathers equal tensors of all ranks into one, in the order of ranks. Before torch 2.13 it has only
# its other name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@contextlib.contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Put the work of callbacks on one stream of the device, the same for all of them.

    A callback of ``collect_all`` is called with the stream of backward as the current one, as its
    future has no devices. What it waits for there, backward would wait for, too. On the CPU nothing
    changes.
    """
    if device.type == "cpu":
        yield
        return
    with torch.get_device_module(device).stream(_own_stream(device)):
        yield


@functools.lru_cache
def _own_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def keep_for_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the memory of tensors until the current stream of their device is done with them.

    The allocator knows the stream on which a tensor was made, and may use its memory there again as
    soon as Python has dropped the tensor. Kernels on another stream may still wait then. Only the
    value of a future is kept anyway, by ``wait()``.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            module = torch.get_device_module(tensor.device)
            tensor.record_stream(module.current_stream(tensor.device))


def new_future(like: torch.Tensor) -> torch.futures.Future[Any]:
    """Return a future whose value will be on the device of ``like``."""
    return torch.futures.Future(devices=None if like.device.type == "cpu" else [like.device])


def value_on_stream(future: torch.futures.Future[Any]) -> Any:
    """Return the value of a complete future, for which the current stream waits.

    On the host nothing waits. ``future.value()`` would synchronise no stream.

    Raises:
        Exception: the error of a failed collective.
    """
    return future.wait()


def wait_for_all(futures: torch.futures.Future[list[torch.futures.Future[Any]]]) -> None:
    """Let the current stream wait for the futures that ``collect_all`` has collected.

    Raises:
        Exception: the error of a failed collective.
    """
    for future in futures.value():
        value_on_stream(future)


def when_all(
    works: Sequence[dist.Work], then: Callable[[], torch.Tensor], uses: Sequence[torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """Return the future of ``then()``, which is called when all of ``works`` are complete.

    The future fails with the error of a failed collective, or of ``then()``.

    Args:
        works: the collectives.
        then: called without arguments.
        uses: the tensors that ``then`` reads and nothing else keeps: those that the collectives
            fill. There is at least one.
    """
    device = uses[0].device
    result = new_future(uses[0])

    def through(futures: torch.futures.Future[list[torch.futures.Future[Any]]]) -> None:
        with on_own_stream(device):
            try:
                wait_for_all(futures)
                keep_for_stream(uses)
                value = then()
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(value)

    torch.futures.collect_all([work.get_future() for work in works]).add_done_callback(through)
    return result


def gather(
    sent: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Start to gather each tensor from all ranks.

    Args:
        sent: contiguous tensors, of the same shapes and dtypes on all ranks.
        group: the group to gather from, of ``W`` ranks.

    Returns:
        The tensors that receive, shapes ``[W, *shape]``, in the order of ranks; and the works.
    """
    gathered = [tensor.new_empty(group.size(), *tensor.shape) for tensor in sent]
    works = [
        all_gather_single(into.view(-1), tensor.view(-1), group=group, async_op=True)
        for into, tensor in zip(gathered, sent, strict=True)
    ]
    return gathered, works


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of the same ranks and backend; every rank of ``group`` has to call this.

    Collectives that a callback starts need it, and collectives with an order of their own: DDP
    starts some of its own between a step's buckets, on its own group. On one shared group the
    order of both kinds would differ between ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend_config(group)
    return dist.new_group(ranks, backend=backend, use_local_synchronization=True)
