"""Set-ups that train with torch's ZeroRedundancyOptimizer inside the hook, and show the
parameters."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance.subjects.spec import Case
from hooks_ref import zero_overlap
from hooks_ref.default_hooks import Hook
from tests.hooks_ref.optimizer_overlap_subjects import INNER, case


def zero(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    rank: int,
    process_group: dist.ProcessGroup,
    *,
    name: str = "hook_with_zero_step",
    whose: str = "ours",
    algorithm: str = "SGD",
    options: dict[str, Any],
    inner: str = "allreduce",
    decay: bool = False,
    shard: bool = False,
    static: bool = False,
    **rest: Any,
) -> Case:
    """Make the hook called ``name``; ``static`` makes DDP's graph static."""
    if static:
        model._set_static_graph()
    sharded = ZeroRedundancyOptimizer(
        model.parameters(),
        getattr(torch.optim, algorithm),
        process_group=process_group,
        overlap_with_ddp=True,
        **options,
    )

    def on_step(step: int) -> None:
        if decay:
            sharded.param_groups[0]["lr"] = options["lr"] / (1 + step)

    inner_state, inner_hook = (
        (process_group, hooks_ref.allreduce_hook) if inner == "allreduce" else INNER[inner]()
    )
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    hook = getattr(zero_overlap if whose == "ours" else ddp_zero_hook, name)(
        inner_hook, model, sharded, shard
    )
    return case(model, optimizer, rank, inner_state, hook, on_step=on_step, **rest)


def refusals(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> Case:
    """Require every error of the two functions, and that a model with their hook can be freed."""
    parameters = list(model.module.parameters())
    good = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    not_overlapped = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    two_groups = ZeroRedundancyOptimizer(groups, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    finds = DistributedDataParallel(model.module, find_unused_parameters=True)
    for make in (zero_overlap.hook_with_zero_step, zero_overlap.hook_with_zero_step_interleaved):
        for arguments, kind, said in (
            ((model.module, good, False), TypeError, "ddp: a DistributedDataParallel"),
            (
                (model, torch.optim.SGD(parameters), False),
                TypeError,
                "zero: a ZeroRedundancyOptimizer",
            ),
            ((model, good, 1), TypeError, "shard_buckets: True or False"),
            (
                (model, not_overlapped, False),
                ValueError,
                "zero: made without overlap_with_ddp=True",
            ),
            ((model, two_groups, False), ValueError, "zero: one parameter group; got 2"),
            ((finds, good, False), ValueError, "ddp: made with find_unused_parameters=True"),
        ):
            with pytest.raises(kind, match=said):
                make(hooks_ref.allreduce_hook, *arguments)
        before = torch.get_rng_state()
        freed = DistributedDataParallel(torch.nn.Linear(2, 2))
        overlapped = ZeroRedundancyOptimizer(
            freed.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        rng_of_linear = torch.get_rng_state()
        freed.register_comm_hook(None, make(hooks_ref.allreduce_hook, freed, overlapped))
        assert torch.equal(torch.get_rng_state(), rng_of_linear), "the global generator was used"
        torch.set_rng_state(before)
        alive = weakref.ref(freed)
        del freed
        gc.collect()
        assert alive() is None, "the hook keeps its model alive"
    return Case(None, hooks_ref.allreduce_hook)


def certified(
    model: DistributedDataParallel, process_group: dist.ProcessGroup, name: str
) -> tuple[dist.ProcessGroup, Hook]:
    """As a user has it, for the kit."""
    sharded = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        process_group=process_group,
        overlap_with_ddp=True,
        lr=0.1,
        momentum=0.9,
    )
    return process_group, getattr(zero_overlap, name)(hooks_ref.allreduce_hook, model, sharded)
