"""torch's PowerSGD, and ours, as subjects of test_low_rank.py."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance import Case


def torchs(process_group: Any = None, **arguments: Any) -> Any:
    return theirs.PowerSGDState(
        process_group,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        **arguments,
    )


def zeros(whose: str, world_size: int) -> Case:
    """All-zero gradients, then the ones that were fed."""
    state, hook = (
        (torchs(), theirs.powerSGD_hook)
        if whose == "torch"
        else (hooks_ref.PowerSGDState(None, 2, 2, 1), hooks_ref.powerSGD_hook)
    )
    calls = 0

    def zero_at_first(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal calls
        calls += bucket.is_last()
        if calls <= 4:
            bucket.buffer().zero_()
        return hook(state, bucket)

    return Case(state, zero_at_first)


def loads_unsafe(rank: int, hook: str, folder: str) -> Case:
    """Torch's hook with torch's state as it was saved, loaded without weights_only."""
    return Case(torch.load(Path(folder) / f"{rank}.pt", weights_only=False), torchs_hook)


def unused_parameters(world_size: int) -> Case:
    """A model of its own, with parameters that take turns at being unused and buckets that never
    settle."""

    class Turns(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))

        def forward(self, x: torch.Tensor, without: int) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = x if number == without else layer(x)
            return x.sum()

    ddp = DistributedDataParallel(Turns(), bucket_cap_mb=1 / 1024, find_unused_parameters=True)
    ddp.register_comm_hook(hooks_ref.PowerSGDState(None, 2, 0, 1), hooks_ref.powerSGD_hook)
    for step in range(30):
        ddp.zero_grad()
        ddp(torch.randn(3, 12), step % 4).backward()
        got = torch.cat(
            [
                parameter.grad.view(-1)
                for parameter in ddp.parameters()
                if parameter.grad is not None
            ]
        )
        everyones = [torch.empty_like(got) for _ in range(world_size)]
        dist.all_gather(everyones, got)
        assert all(torch.equal(got, other) for other in everyones), f"step {step}: ranks differ"
    return Case(None, hooks_ref.allreduce_hook)


torchs_hook = theirs.powerSGD_hook
torchs_batched_hook = theirs.batched_powerSGD_hook
