"""Collectives under one name in every torch, and what to do when several are through."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Gathers equal tensors of all ranks into one, in the order of ranks; before torch 2.13 under its other name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def when_all(
    works: Sequence[dist.Work], then: Callable[[], torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """Return the future of ``then()``, called when all of ``works`` are through."""

    def through(futures: torch.futures.Future[list[torch.futures.Future[Any]]]) -> torch.Tensor:
        for future in futures.value():
            future.value()  # raises what the collective raised
        return then()

    return torch.futures.collect_all([work.get_future() for work in works]).then(through)


def gather(
    sent: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Start to gather each tensor from all ranks, into one of shape ``[W, *shape]``; return those and the works."""
    gathered = [tensor.new_empty(group.size(), *tensor.shape) for tensor in sent]
    return gathered, [
        all_gather_single(into.view(-1), tensor.view(-1), group=group, async_op=True)
        for into, tensor in zip(gathered, sent, strict=True)
    ]


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of the same ranks and backend; all of them have to call this.

    For collectives that a callback starts, or that have to keep an order of their own: DDP starts some between a step's
    buckets, on its own group, and on each rank those would come at another place among these.
    """
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend_config(group)
    return dist.new_group(ranks, backend=backend, use_local_synchronization=True)
