"""torch's PowerSGD, and ours, as subjects of test_low_rank.py."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

import hooks_ref
from conformance import Case


def torchs(process_group: Any = None, **arguments: Any) -> Any:
    return theirs.PowerSGDState(process_group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1, **arguments)


def zeros(whose: str, world_size: int) -> Case:
    """All-zero gradients, then the ones that were fed."""
    state, hook = (
        (torchs(), theirs.powerSGD_hook) if whose == "torch" else (hooks_ref.PowerSGDState(None, 2, 2, 1), hooks_ref.powerSGD_hook)
    )
    calls = 0

    def zero_at_first(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal calls
        calls += bucket.is_last()
        if calls <= 4:
            bucket.buffer().zero_()
        return hook(state, bucket)

    return Case(state, zero_at_first)


torchs_hook, torchs_batched_hook = theirs.powerSGD_hook, theirs.batched_powerSGD_hook
