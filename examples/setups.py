"""Set-ups for ``--setup``, of the reference hooks that need more than a state.

Each function is called once per rank, with the arguments that its signature names: the DDP model,
the process group, the rank and others. It returns (state, hook), or a Case if the kit needs more,
such as the object whose state is saved.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance import Case


def fp16_wrapped(process_group: dist.ProcessGroup) -> Any:
    """Send float16 by a wrapped hook."""
    return process_group, hooks_ref.fp16_compress_wrapper(hooks_ref.allreduce_hook)


def bf16_wrapped(process_group: dist.ProcessGroup) -> Any:
    """Send bfloat16 by a wrapped hook."""
    return process_group, hooks_ref.bf16_compress_wrapper(hooks_ref.allreduce_hook)


def encoded(process_group: dist.ProcessGroup) -> Any:
    """Encode before the allreduce and decode after it, by casts."""
    return process_group, hooks_ref.encode_and_decode_hook(
        lambda flat: flat.half(), lambda mean, into: into.copy_(mean)
    )


def by_name(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> None:
    """Register a hook by its name in an enum."""
    hooks_ref.register_ddp_comm_hook(hooks_ref.DDPCommHookType.BF16_COMPRESS, model, process_group)


def pairs(process_group: dist.ProcessGroup, rank: int, world_size: int) -> Any:
    """Average over pairs of neighbours from the third step on.

    If the number of ranks is odd, the last one is alone.
    """
    places = [list(range(first, min(first + 2, world_size))) for first in range(0, world_size, 2)]
    mine = [dist.get_global_rank(process_group, place) for place in places[rank // 2]]
    subgroup = dist.new_group(mine, use_local_synchronization=True)
    return hooks_ref.PostLocalSGDState(
        process_group, subgroup, start_localSGD_iter=2
    ), hooks_ref.post_localSGD_hook


def own(process_group: dist.ProcessGroup) -> Any:
    """Keep each rank's own gradients from the third step on."""
    state = hooks_ref.PostLocalSGDState(
        process_group, None, start_localSGD_iter=2, post_local_gradient_allreduce=False
    )
    return state, hooks_ref.post_localSGD_hook


def sgd_in_the_hook(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> Case:
    """Step SGD with momentum on each bucket as it is reduced, and save its momentum."""
    optimizer = hooks_ref.OptimizerHookState(
        hooks_ref.functional(torch.optim.SGD, lr=0.1, momentum=0.9), model.parameters()
    )
    return Case(
        process_group,
        hooks_ref.hook_then_optimizer(hooks_ref.allreduce_hook, optimizer),
        saved=optimizer,
    )


def adagrad_out_of_place(process_group: dist.ProcessGroup) -> Any:
    """Step Adagrad after a hook whose result is another tensor than the bucket's.

    Adagrad's state does not begin at zero.
    """
    optimizer = hooks_ref.OptimizerHookState(
        hooks_ref.functional(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)
    )
    return process_group, hooks_ref.hook_then_optimizer(_mean_of_a_copy, optimizer)


def _mean_of_a_copy(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    mean = bucket.buffer() / group.size()
    work = dist.all_reduce(mean, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value() and mean)


class _Descent:
    """An optimizer that steps one parameter at a time."""

    def step_param(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        with torch.no_grad():
            param.sub_(grad, alpha=0.1)


def descent_in_the_hook(process_group: dist.ProcessGroup) -> Any:
    """Step each parameter of a bucket by a custom optimizer as the bucket is reduced."""
    return process_group, hooks_ref.hook_then_optimizer(
        hooks_ref.allreduce_hook, hooks_ref.OptimizerHookState(_Descent())
    )


def adam_in_the_hook(process_group: dist.ProcessGroup) -> Any:
    """Step Adam on each bucket as it is reduced in float16."""
    optimizer = hooks_ref.OptimizerHookState(hooks_ref.functional(torch.optim.Adam, lr=0.01))
    return process_group, hooks_ref.hook_then_optimizer(hooks_ref.fp16_compress_hook, optimizer)


def sgd_in_backward(process_group: dist.ProcessGroup) -> Any:
    """Step SGD on each bucket as it is reduced, and free its gradients."""
    optimizer = hooks_ref.OptimizerHookState(hooks_ref.functional(torch.optim.SGD, lr=0.1))
    return process_group, hooks_ref.apply_optim_in_backward_hook(optimizer)


def _zero(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        process_group=process_group,
        overlap_with_ddp=True,
        lr=0.1,
    )


def zero_after_backward(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> Any:
    """Step a sharded SGD after the last bucket was reduced."""
    return process_group, hooks_ref.hook_with_zero_step(
        hooks_ref.allreduce_hook, model, _zero(model, process_group)
    )


def zero_interleaved(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> Any:
    """Step a sharded SGD on each bucket as it is reduced."""
    return process_group, hooks_ref.hook_with_zero_step_interleaved(
        hooks_ref.allreduce_hook, model, _zero(model, process_group)
    )
