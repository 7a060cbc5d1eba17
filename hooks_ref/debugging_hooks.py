"""Hooks that leave out a part of the work, to measure the cost of that part.

Source: torch documentation, "DDP Communication Hooks", section "Debugging Communication Hooks".
"""

from typing import Any

import torch
import torch.distributed as dist


def noop_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return this rank's own gradients, with no communication: replicas diverge.

    Only for measuring the headroom that a faster allreduce could give.

    Args:
        _: ignored; any state may be registered.
        bucket: one bucket of gradients; its buffer is one-dimensional, in parameter units.

    Returns:
        A completed future that holds ``bucket.buffer()`` itself, shape ``[numel]``.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
