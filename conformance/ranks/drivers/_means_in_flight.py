"""Means of DDP that are under way until the end of a backward, as on a slow network.

While a collective is in flight, its buffer holds neither the rank's gradients nor their mean. With
``gradient_as_bucket_view=True`` gradients are views of these buffers. An optimizer that reads or
writes them in a hook of the backward, or in a callback at its end, is lucky if DDP's allreduce is
over by then. Here it is never over by then: each bucket is filled with other numbers when it is
ready, and the mean arrives in the last moment, when DDP itself begins to wait for it. What somebody
has written in the meantime stays, as if the write had come after the mean.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.torch_versions.private import at_end_of_backward


@dataclass
class _Bucket:
    """A bucket in flight.

    Attributes:
        buffer: of DDP; gradients are views of it.
        in_flight: what the buffer holds until the mean arrives.
        share: this rank's share of the mean.
        future: DDP waits for it.
    """

    buffer: torch.Tensor
    in_flight: torch.Tensor
    share: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


def hold_means_back(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Let the means of each backward arrive when DDP waits for them, and not before.

    Args:
        ddp: its communication hook is registered here.
        group: its group.
    """
    size, place = dist.get_world_size(group), dist.get_rank(group)
    buckets: list[_Bucket] = []

    def arrive() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket.share, group=group)
            is_untouched = bucket.buffer == bucket.in_flight
            bucket.buffer.copy_(torch.where(is_untouched, bucket.share, bucket.buffer))
            bucket.future.set_result(bucket.buffer)
        buckets.clear()

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        share = buffer / size
        # Powers of two: neither a mean nor a sum over ranks is any rank's own number.
        numbers = torch.arange(buffer.numel(), device=buffer.device) % 5 + 3
        buffer.copy_(numbers * 2**place)
        devices = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        buckets.append(_Bucket(buffer, buffer.clone(), share, future))
        if bucket.is_last():
            # DDP begins to wait in a callback of its own, which it queues next.
            at_end_of_backward(arrive)
        return future

    ddp.register_comm_hook(None, hook)
