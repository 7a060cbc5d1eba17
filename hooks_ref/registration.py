"""Register a hook by its name in an enum: torch's ``DDPCommHookType`` with our hooks.

Source: torch.distributed.algorithms.ddp_comm_hooks, ``DDPCommHookType`` and
``register_ddp_comm_hook``.
"""

import enum
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hooks_ref.debugging_hooks import noop_hook
from hooks_ref.default_hooks import Hook, allreduce_hook, bf16_compress_hook, fp16_compress_hook
from hooks_ref.low_rank import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from hooks_ref.quantization import quantization_perchannel_hook, quantization_pertensor_hook


def _register(hook: Hook, model: DistributedDataParallel, state: Any) -> Any:
    model.register_comm_hook(state, hook)
    return state


def _register_power_sgd(
    hook: Hook, model: DistributedDataParallel, state: Any, **arguments: Any
) -> PowerSGDState:
    made = state if isinstance(state, PowerSGDState) else PowerSGDState(state, **arguments)
    model.register_comm_hook(made, hook)
    return made


def _member(
    register: Callable[..., Any], hook: Callable[..., Any], **arguments: Any
) -> "partial[Any]":
    return partial(register, hook, **arguments)


class DDPCommHookType(enum.Enum):
    """The hooks by name.

    ``DDPCommHookType.X.value(model=, state=)`` registers a hook and returns its state. The state of
    the plain hooks is a process group or None. The state of the PowerSGD members is a process
    group, None, or a :class:`PowerSGDState`; keyword arguments, e.g. ``start_powerSGD_iter=10``, go
    to the new state.
    """

    ALLREDUCE = _member(_register, allreduce_hook)
    FP16_COMPRESS = _member(_register, fp16_compress_hook)
    BF16_COMPRESS = _member(_register, bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _member(_register, quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _member(_register, quantization_perchannel_hook)
    POWER_SGD = _member(_register_power_sgd, powerSGD_hook, matrix_approximation_rank=1)
    POWER_SGD_RANK2 = _member(_register_power_sgd, powerSGD_hook, matrix_approximation_rank=2)
    BATCHED_POWER_SGD = _member(
        _register_power_sgd, batched_powerSGD_hook, matrix_approximation_rank=1
    )
    BATCHED_POWER_SGD_RANK2 = _member(
        _register_power_sgd, batched_powerSGD_hook, matrix_approximation_rank=2
    )
    NOOP = _member(_register, noop_hook)


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType,
    model: DistributedDataParallel,
    state: Any = None,
    **arguments: Any,
) -> Any:
    """Register a hook by name and return its state, which has to be saved with the model.

    Args:
        comm_hook_type: the name of the hook.
        model: the DDP module.
        state: a process group, None for the default one, or the state itself.
        **arguments: arguments of the new state, for the PowerSGD members.

    Returns:
        The state that the hook is registered with.

    Raises:
        TypeError: ``comm_hook_type`` is not a member, or the hook has no such argument.
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise TypeError(f"comm_hook_type: a DDPCommHookType; got {comm_hook_type!r}")
    return comm_hook_type.value(model=model, state=state, **arguments)
