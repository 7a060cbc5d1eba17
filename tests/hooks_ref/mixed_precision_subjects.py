"""States by the name of their dtype, and torch's native mixed precision."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from conformance.subjects.spec import Case
from hooks_ref.mixed_precision import MixedPrecisionState, allreduce_and_upcast_hook


def state(process_group: dist.ProcessGroup, dtype: str) -> MixedPrecisionState:
    return MixedPrecisionState(process_group, getattr(torch, dtype))


def saved(rank: int, load: str | None = None, save: str | None = None) -> Case:
    """Reduce in bfloat16 with a state that is saved at the end, or was."""
    made = (
        torch.load(Path(load, f"{rank}.pt"), weights_only=True)
        if load
        else MixedPrecisionState(None, torch.bfloat16)
    )
    return Case(
        made,
        allreduce_and_upcast_hook,
        close=lambda: torch.save(made, Path(save, f"{rank}.pt")) if save else None,
    )


def fed_1e5(rank: int) -> Case:
    """Reduce values in float16 that float16 cannot hold on rank 0, and zeros on the other ranks."""

    def hook(
        state: MixedPrecisionState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        bucket.buffer().fill_(0.0 if rank else 1e5)
        return allreduce_and_upcast_hook(state, bucket)

    return Case(MixedPrecisionState(None, torch.float16), hook)


def torchs(rank: int) -> Case:
    """Run a forward of DDP's own."""
    DistributedDataParallel(
        torch.nn.Linear(2, 2), mixed_precision=_MixedPrecision(reduce_dtype=torch.float16)
    )(torch.ones(1, 2))
    return Case()
