"""Every private part of torch that the kit uses, behind a function or a name of the kit's own.

``names.py`` lists the parts, with the versions of torch that have them. A part that some supported
version lacks is replaced here, so that callers need not know which torch they run with.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

# --- futures --------------------------------------------------------------------------------------

AnyFuture: Any = torch._C.Future
"""The C++ class of futures, which ``then()`` returns and torch.futures.Future extends."""

# Returns its argument, a future, as another Python object of the same C++ future.
another_object: Any = torch._C._create_function_from_graph(
    "another_object", torch._C.parse_ir("graph(%future : Future(Tensor)):\n  return (%future)")
)

# --- kernels of collectives -----------------------------------------------------------------------

# Methods of a process group, and operators of ``c10d``, whose names torch keeps to itself. The
# operators end with another underscore.
ALLGATHER_BASE = "_allgather_base"
REDUCE_SCATTER_BASE = "_reduce_scatter_base"

Kernel = Callable[..., Any]
"""Receives the dispatch keys and the arguments of an operator, and makes the call."""


def override_kernel(library: Any, name: str, key: str, wrap: Callable[[Kernel], Kernel]) -> None:
    """Override the kernel of an operator of ``c10d`` for one key; without a kernel, do nothing.

    From torch 2.9 on, the kernel itself is looked up and replaced. Before, no kernel can be looked
    up: the new one is entered for autograd's key, which is dispatched to first and which these
    operators leave empty, and passes the call on to the keys below.

    Args:
        library: a library of ``c10d`` for implementations.
        name: the operator.
        key: the key of a device, such as ``CPU``.
        wrap: returns the new kernel for the kernel to call.
    """
    find = getattr(torch.library, "get_kernel", None)
    if find is not None:
        try:
            kernel = find(f"c10d::{name}", key)
        except (RuntimeError, ValueError):
            return
        library.impl(name, wrap(kernel.call_boxed), key, with_keyset=True, allow_override=True)
        return
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
        return
    operator = getattr(torch.ops.c10d, name).default

    def below(keys: Any, *args: Any) -> Any:
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

    library.impl(name, wrap(below), f"Autograd{key}", with_keyset=True)


def type_of_script_object(value: torch.ScriptObject) -> str:
    """Return the name of the C++ class in a box."""
    return str(value._type())


# --- process groups -------------------------------------------------------------------------------


def known_groups() -> Any:
    """Return torch's tables of process groups: ``pg_map``, ``pg_group_ranks``, ``pg_names``."""
    return distributed_c10d._world


def timeouts_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the timeouts of a group's backends, by device type; some backends have none."""
    found = {}
    for device in group._device_types:
        with contextlib.suppress(Exception):
            found[device.type] = str(group._get_backend(device).options._timeout)
    return found


def set_default_group(group: Any) -> None:
    """Make a group the default one."""
    distributed_c10d._update_default_pg(group)


def default_store() -> dist.Store:
    """Return the store of the default group."""
    return distributed_c10d._get_default_store()


def on_new_group(before: Callable[[], None]) -> None:
    """Call ``before`` whenever this process begins to make a group."""
    make_group = distributed_c10d._new_process_group_helper

    def making_group(*args: Any, **kwargs: Any) -> Any:
        before()
        return make_group(*args, **kwargs)

    distributed_c10d._new_process_group_helper = making_group


def flight_record() -> str | bytes:
    """Return the flight recorder's last collectives as JSON, or why there is none."""
    trace: str | bytes = b""
    # A backend has one of these or the other; if torch has NCCL, it has both. Up to torch 2.7 only
    # NCCL has one.
    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        try:
            trace = getattr(torch._C._distributed_c10d, dump)(True, False)
        except (AttributeError, RuntimeError) as error:
            trace = trace or f"no flight recorder: {error}"
        if "entries" in str(trace):
            break
    return trace


# --- DistributedDataParallel ----------------------------------------------------------------------


def check_hook(ddp: DistributedDataParallel, hook: Any) -> None:
    """Raise the error of DDP if it does not take a hook."""
    ddp._check_comm_hook(hook)


def logged_hook(ddp: DistributedDataParallel) -> str:
    """Return the name of the hook in DDP's log."""
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))


def empty_bucket(ddp: DistributedDataParallel) -> dist.GradBucket:
    """Return the first bucket of a model, with zeros."""
    return ddp.reducer._get_zeros_like_grad_buckets()[0]


def synchronise_buffers(ddp: DistributedDataParallel) -> None:
    """Send the buffers of rank 0 to all ranks, as the next forward would."""
    ddp._sync_buffers()


def divides_by_all(ddp: DistributedDataParallel) -> bool:
    """Whether gradients under Join are divided by the number of all ranks.

    DDP's own allreduce can divide by the number of ranks that have inputs left. A hook does not
    know that number.
    """
    return bool(getattr(ddp, "_divide_by_initial_world_size", True) or ddp._comm_hooks)


def reduces_by_compiled_autograd(ddp: DistributedDataParallel) -> bool:
    """Whether compiled autograd reduces the gradients, and not the reducer."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def delays_reduction(ddp: DistributedDataParallel) -> bool:
    """Whether ``delay_all_reduce_named_params`` is in use."""
    delays_all = getattr(ddp, "_delay_all_reduce_all_params", False)
    return bool(delays_all or getattr(ddp, "_delay_all_reduce_params", None))


def tensors_of(output: Any) -> Any:
    """Return the tensors of an output, as DDP finds them."""
    from torch.nn.parallel.distributed import _find_tensors

    return _find_tensors(output)


# --- autograd -------------------------------------------------------------------------------------


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saved_tensors_are_packed() -> bool:
    """Whether hooks on saved tensors are in force: a tensor that has hooks takes no others."""
    saved: Any = torch.ones(1, requires_grad=True).exp().grad_fn
    try:
        saved._raw_saved_result.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError:
        return True
    return False


def hooks_on_saved_tensors() -> str:
    """Return whether hooks on saved tensors are allowed, and whether some are in force."""
    autograd = torch._C._autograd
    enabled = str(autograd._saved_tensors_hooks_is_enabled())
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        in_force = top(True) is not None
    else:
        # Since torch 2.8 the hooks themselves can be read.
        with torch.enable_grad(), torch.inference_mode(False):
            in_force = saved_tensors_are_packed()
    return enabled + (" in force" if in_force else " none")


# --- settings of the process ----------------------------------------------------------------------

# Getters without arguments, for flags that torch.backends only has setters for.
_GETTERS = (
    "_get_nnpack_enabled",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_linalg_preferred_backend",
    "_get_blas_preferred_backend",
    "_get_sdp_priority_order",
    "_get_default_mobile_cpu_allocator",
    "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_warnAlways",
    "_get_onednn_allow_tf32",
    "_is_multithreading_enabled",
    "_is_view_replay_enabled",
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "_is_torch_function_enabled",
)


def getters_of_flags() -> dict[str, Callable[[], Any]]:
    """Return the functions that read torch's flags, by name; those that this torch has."""
    found = {}
    for name in _GETTERS:
        if function := getattr(torch._C, name, None):
            found[name.removeprefix("_get_").removeprefix("_")] = function
    return found


def print_options() -> Any:
    """Return the options for printing tensors."""
    return torch._tensor_str.PRINT_OPTS


def global_hooks() -> dict[str, Mapping[Any, Any]]:
    """Return the tables of hooks that torch calls for every module and every optimizer."""
    found = {}
    for owner, name in _NAMES_OF_GLOBAL_HOOKS:
        value = getattr(sys.modules[owner], name, None)
        if isinstance(value, Mapping):
            found[name] = value
    return found


# They are read in every step, and a module has hundreds of other names.
_NAMES_OF_GLOBAL_HOOKS = [
    (owner, name)
    for owner in ("torch.nn.modules.module", "torch.optim.optimizer")
    for name in vars(sys.modules[owner])
    if name.startswith("_global_")
]


# --- modules and functions ------------------------------------------------------------------------

# Modules and classes whose functions all code shares. Those that are not imported are left out.
SHARED_MODULES = (
    "torch.distributed._functional_collectives",
    "torch._C._distributed_c10d",
    "torch._C._nn",
)
SHARED_CLASSES = ("torch._C.Future",)

# Modules that torch imports on first use. A host imports them for all of its ranks.
IMPORTED_LATE = ("torch._dynamo", "torch._dynamo.trace_rules", "torch._dynamo.utils")
IN_SOME_VERSIONS = ("torch.profiler._cupti_monitor",)


def clear_caches_of_dynamo() -> None:
    """Clear the caches that ``init_process_group()`` clears."""
    clear = getattr(sys.modules["torch._dynamo.trace_rules"], "clear_lru_cache", None)
    if clear:
        clear()


def wrapped_by_dynamo(function: Any) -> Any:
    """Return the function that dynamo has wrapped, or None."""
    return getattr(function, "_torchdynamo_orig_callable", None)


# Files below torch's folder whose code wraps functions of torch itself.
WRAPPING_FILES = ("/optim/optimizer.py", "/_compile.py", "/_dynamo/eval_frame.py")

# A decorator: dynamo does not trace the function.
without_dynamo: Any = torch._disable_dynamo

# --- CUDA -----------------------------------------------------------------------------------------


def busy_device(cycles: int) -> None:
    """Keep the current CUDA stream busy."""
    torch.cuda._sleep(cycles)
