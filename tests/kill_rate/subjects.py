"""Subjects for options of the references that no command of the README uses.

A copy of this file stands beside the mutated references, and imports them.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hooks_ref

_OPTIONS: dict[str, Any] = {"start_powerSGD_iter": 2, "min_compression_rate": 1}


def power_sgd(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> None:
    """Register PowerSGD by its name."""
    _register("POWER_SGD", model, process_group)


def power_sgd_rank2(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> None:
    """Register PowerSGD of rank 2 by its name."""
    _register("POWER_SGD_RANK2", model, process_group)


def batched_power_sgd(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> None:
    """Register batched PowerSGD by its name."""
    _register("BATCHED_POWER_SGD", model, process_group)


def batched_power_sgd_rank2(
    model: DistributedDataParallel, process_group: dist.ProcessGroup
) -> None:
    """Register batched PowerSGD of rank 2 by its name."""
    _register("BATCHED_POWER_SGD_RANK2", model, process_group)


def power_sgd_with_a_state(
    model: DistributedDataParallel, process_group: dist.ProcessGroup
) -> None:
    """Register PowerSGD by its name, with a state whose rank is not that of the name."""
    state = hooks_ref.PowerSGDState(process_group, matrix_approximation_rank=2, **_OPTIONS)
    hooks_ref.register_ddp_comm_hook(hooks_ref.DDPCommHookType.POWER_SGD, model, state)


def _register(name: str, model: DistributedDataParallel, process_group: dist.ProcessGroup) -> None:
    hook = hooks_ref.DDPCommHookType[name]
    hooks_ref.register_ddp_comm_hook(hook, model, process_group, **_OPTIONS)


def all_of_the_model(
    model: torch.nn.Module, is_final_microbatch: bool
) -> AbstractContextManager[None]:
    """Average the gradients of all parameters of the model, whatever its optimizers are."""
    return hooks_ref.ddp_sync_context(model, is_final_microbatch, "forced_sync")


def with_its_own_function(module: torch.nn.Module) -> torch.nn.Module:
    """Recompute by a function given to the wrapper."""

    def function(run: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return hooks_ref.checkpoint_wrapper(module, checkpoint_fn=function)


def keeps_products(module: torch.nn.Module) -> torch.nn.Module:
    """Recompute all but products."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return hooks_ref.checkpoint_wrapper(module, context_fn=contexts)


def inside_a_model(module: torch.nn.Module) -> torch.nn.Module:
    """Wrap the module as a part of a model."""
    model = torch.nn.Sequential(module)
    hooks_ref.apply_activation_checkpointing(model, check_fn=lambda inner: inner is module)
    return model[0]
