"""Collectives under one name in every torch, and a continuation of several collectives."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Gathers equal tensors of all ranks into one, in the order of ranks. Before torch 2.13 it has only
# its other name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def when_all(
    works: Sequence[dist.Work], then: Callable[[], torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """Return the future of ``then()``, which is called when all of ``works`` are complete.

    The future fails with the error of a failed collective, or of ``then()``.
    """

    def through(futures: torch.futures.Future[list[torch.futures.Future[Any]]]) -> torch.Tensor:
        for future in futures.value():
            future.value()  # raises the error of a failed collective
        return then()

    return torch.futures.collect_all([work.get_future() for work in works]).then(through)


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
