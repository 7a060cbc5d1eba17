"""The collectives that Python code starts, overheard for the length of one step of a training run.

Methods of ``ProcessGroup`` are replaced for as long as somebody listens, and put back when nobody does. Collectives that C++
starts by itself, such as DDP's own allreduce, do not pass here. Works and futures are handed on untouched and none is kept,
unlike in ``collectives.py``, which overrides kernels and keeps every Work: that is for ranks that soon end.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# By method: the place of what this rank gives, and whether all ranks give as much of the same dtype. Sends are left out.
_METHODS = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), (0, True)),
    **dict.fromkeys(("allgather", "allgather_coalesced", "all_gather_single", "_allgather_base"), (1, True)),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"), (1, True)),
    **dict.fromkeys(("alltoall", "all_to_all_single", "alltoall_base", "gather", "scatter", "barrier"), (-1, False)),
}
_ROOTED = ("broadcast", "reduce")
MOST = 10_000  # collectives of one step that are kept

_lock = threading.RLock()
_listeners: list["Listener"] = []
_originals: dict[str, Any] = {}
own_groups: set[str] = set()  # the kit's, which nobody hears


class Listener:
    """Hears the collectives of this process between :meth:`open` and :meth:`close`.

    Attributes:
        heard: (thread, what, ranks of the group, name of the group), in the order of their start.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[int, str, list[int], str]] = []

    def open(self) -> None:
        with _lock:
            if not _listeners:
                _replace()
            _listeners.append(self)

    def close(self) -> None:
        """Hear no more; may be called again."""
        with _lock:
            if self in _listeners:
                _listeners.remove(self)
                if not _listeners:
                    _put_back()


def _replace() -> None:
    for name in _METHODS:
        if original := dist.ProcessGroup.__dict__.get(name):
            _originals[name] = original
            setattr(dist.ProcessGroup, name, _noting(name, original))


def _put_back() -> None:
    for name, original in _originals.items():
        setattr(dist.ProcessGroup, name, original)
    _originals.clear()


def _noting(name: str, original: Any) -> Callable[..., Any]:
    def noting(group: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # of a group or a call of a form that we do not know: it goes unheard
            _note(name, group, args, kwargs)
        return original(group, *args, **kwargs)

    return noting


def _note(name: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if group.group_name in own_groups:
        return
    heard = threading.get_ident(), _what(name, args, kwargs), sorted(dist.get_process_group_ranks(group)), group.group_name
    for listener in list(_listeners):
        if len(listener.heard) < MOST:
            listener.heard.append(heard)


def _what(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what all ranks of a group have to agree on, in words."""
    given, alike = _METHODS[name]
    options = next((arg for arg in (*args, *kwargs.values()) if hasattr(arg, "reduceOp")), None)
    asked = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, (dist.ReduceOp, dist.ReduceOp.RedOpType))), None)
    op = options.reduceOp if options is not None else asked
    words = [name, "" if op is None else str(getattr(op, "op", op)).rpartition(".")[2]]
    if alike and len(args) > given:
        tensors = _tensors(args[given])
        words += [str(sum(tensor.numel() for tensor in tensors)), str(tensors[0].dtype).removeprefix("torch.") if tensors else ""]
    if name in _ROOTED:
        roots = [arg.rootRank for arg in (*args, *kwargs.values()) if hasattr(arg, "rootRank")]
        words += [f"root {roots[0]}"] if roots else []
    return " ".join(filter(None, words))


def _tensors(given: Any) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else [tensor for part in given for tensor in _tensors(part)]
