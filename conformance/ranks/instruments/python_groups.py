"""Process groups that are written in Python: subclasses of ``dist.ProcessGroup``.

Calls to their methods never pass torch's operators, whose kernels the collective recorder
overrides. DDP's own collectives reach these methods through torch's bindings, and a subject's
directly. So the methods themselves are wrapped, of each such class.
"""

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from conformance.torch_versions.private import ALLGATHER_BASE, REDUCE_SCATTER_BASE


@dataclass(frozen=True)
class Method:
    """One collective as a method of a process group.

    Attributes:
        kernel: the name of the operator in ``c10d`` that does the same.
        given: the position of the tensors that this rank contributes; -1 if there are none.
        rooted: whether its options name a root.
    """

    kernel: str
    given: int
    rooted: bool = False


# Operators of ``c10d``.
_ALLGATHER = f"{ALLGATHER_BASE}_"
_REDUCE_SCATTER = f"{REDUCE_SCATTER_BASE}_"

METHODS = {
    "allreduce": Method("allreduce_", 0),
    "allreduce_coalesced": Method("allreduce_coalesced_", 0),
    "allgather": Method("allgather_", 1),
    "allgather_coalesced": Method("allgather_", 1),
    ALLGATHER_BASE: Method(_ALLGATHER, 1),
    "all_gather_single": Method(_ALLGATHER, 1),
    "all_gather_single_coalesced": Method(_ALLGATHER, 1),
    "allgather_into_tensor_coalesced": Method(_ALLGATHER, 1),
    "reduce_scatter": Method("reduce_scatter_", 1),
    REDUCE_SCATTER_BASE: Method(_REDUCE_SCATTER, 1),
    "reduce_scatter_single": Method(_REDUCE_SCATTER, 1),
    "reduce_scatter_single_coalesced": Method(_REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced": Method(_REDUCE_SCATTER, 1),
    "alltoall": Method("alltoall_", 1),
    "alltoall_base": Method("alltoall_base_", 1),
    "all_to_all_single": Method("alltoall_base_", 1),
    "broadcast": Method("broadcast_", 0, rooted=True),
    "reduce": Method("reduce_", 0, rooted=True),
    "gather": Method("gather_", 1, rooted=True),
    "scatter": Method("scatter_", 1, rooted=True),
    "barrier": Method("barrier", -1),
    "send": Method("send", 0),
    "recv": Method("recv_", -1),
}

# Receives the method's description, the group, the arguments, and a function that makes the call.
Around = Callable[[Method, Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]


def wrap_python_groups(around: Around) -> None:
    """Let ``around`` make the calls of all process groups that are written in Python."""
    for group_class in _subclasses(dist.ProcessGroup):
        for name, described in METHODS.items():
            method = vars(group_class).get(name)
            if isinstance(method, types.FunctionType):
                setattr(group_class, name, _wrapped(method, described, around))


def root_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the root that the options of a call name, or None."""
    for argument in (*args, *kwargs.values()):
        root = getattr(argument, "rootRank", None)
        if isinstance(root, int):
            return root
    return None


def _wrapped(method: Callable[..., Any], described: Method, around: Around) -> Callable[..., Any]:
    @functools.wraps(method)
    def recorded(group: Any, *args: Any, **kwargs: Any) -> Any:
        return around(described, group, args, kwargs, lambda: method(group, *args, **kwargs))

    return recorded


def _subclasses(group_class: type[Any]) -> Iterator[type[Any]]:
    for subclass in group_class.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
