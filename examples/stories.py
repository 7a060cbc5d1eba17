"""Hooks of the stories in docs/stories.md: each is wrong as published hooks are."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs


class Residuals:
    """What has not been sent, for each parameter."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.kept: dict[torch.Tensor, torch.Tensor] = {}


def half_with_feedback(
    state: Residuals, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send the larger half of each gradient, and keep the rest for the next step.

    A NaN is sent, but NaN minus NaN is NaN: it stays in ``kept``, and is sent in every later step.
    """
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter in state.kept:
            gradient.add_(state.kept[parameter])
        flat = gradient.flatten()
        largest = flat.abs().topk((flat.numel() + 1) // 2).indices
        sent = torch.zeros_like(flat)
        sent[largest] = flat[largest]
        state.kept[parameter] = gradient - sent.view_as(gradient)
        gradient.copy_(sent.view_as(gradient))
    buffer = bucket.buffer().div_(state.process_group.size())
    work = dist.all_reduce(buffer, group=state.process_group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def power_sgd_one_at_a_time(
    state: torchs.PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """torch's PowerSGD, with each bucket complete before the next begins, so that it never hangs
    on Gloo.
    """
    future = torchs.powerSGD_hook(state, bucket)
    future.wait()
    return future
