"""torch's own hooks and contexts, in the shapes that a target on the command line cannot spell.

The functions with a DDP model or a process group are for ``--setup``; the others are subjects.
"""

import contextlib
import functools
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
)
from torch.distributed.optim.functional_sgd import _FunctionalSGD
from torch.nn.parallel import DistributedDataParallel

# DDP refuses any hook named bf16_compress_hook on CPU, and a partial has no name.
bf16_compress = functools.partial(default_hooks.bf16_compress_hook)
bf16_wrapped = functools.partial(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook))
fp16_wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)


def local_pairs(process_group: dist.ProcessGroup, rank: int, world_size: int) -> Any:
    """Average over pairs of neighbours from the third step on, by torch's post-local SGD."""
    places = [list(range(first, min(first + 2, world_size))) for first in range(0, world_size, 2)]
    mine = [dist.get_global_rank(process_group, place) for place in places[rank // 2]]
    subgroup = dist.new_group(mine, use_local_synchronization=True)
    state = post_localSGD_hook.PostLocalSGDState(process_group, subgroup, start_localSGD_iter=2)
    return state, post_localSGD_hook.post_localSGD_hook


def sgd_in_the_hook(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> Any:
    """Step torch's functional SGD with momentum on each bucket as it is reduced."""
    optimizer = _FunctionalSGD([], lr=0.1, momentum=0.9, _allow_empty_param_list=True)
    state = optimizer_overlap_hooks._OptimizerHookState(optimizer, list(model.parameters()))
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    return process_group, hook


def no_sync(
    model: DistributedDataParallel, is_final_microbatch: bool
) -> contextlib.AbstractContextManager[None]:
    """Use no_sync in all micro-batches but the last, as torch's documentation does."""
    return contextlib.nullcontext() if is_final_microbatch else model.no_sync()
