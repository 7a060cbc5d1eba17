"""Collectives on record: every one that this rank issues, from any thread, with its Work.

The kernels of ``c10d::*`` are overridden in this process for the keys of the CPU and of the run's device, which sees direct calls on
a process group, callbacks on other threads and C++ alike. The override dies with the rank.
"""

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class _Kernel:
    """The places of a kernel's arguments: what this rank gives (-1: nothing), the root (-1: there is none)."""

    given: int
    root: int = -1


_COLLECTIVES = {
    **{"allreduce_": _Kernel(0), "allreduce_coalesced_": _Kernel(0), "allgather_": _Kernel(1), "_allgather_base_": _Kernel(1)},
    **{"reduce_scatter_": _Kernel(1), "_reduce_scatter_base_": _Kernel(1), "alltoall_": _Kernel(1), "alltoall_base_": _Kernel(1)},
    **{"broadcast_": _Kernel(0, root=2), "reduce_": _Kernel(0, root=3), "gather_": _Kernel(1, root=3), "scatter_": _Kernel(1, root=3)},
    "barrier": _Kernel(-1),
}
# Kept, but not waited for: waiting for a receive twice does not end on Gloo.
_POINT_TO_POINT = {"send": _Kernel(0), "recv_": _Kernel(-1)}
# What each rank gives to these has the same size and dtype on all of them; to the others it need not have.
_ALIKE = _COLLECTIVES.keys() - {"alltoall_", "alltoall_base_", "gather_", "scatter_", "barrier"}
_REDUCING = ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base")


class CollectiveRecorder:
    """Keeps the collectives of this process and what they were given; can make the next one raise.

    Args:
        issued: called with the fingerprint of each collective before it begins, see :func:`_fingerprint`.
        begun: called with the Work of each collective before the call that begins it returns.
        key: under which torch keeps kernels for the run's device.
        callbacks: whether to note which collectives callbacks start.
    """

    def __init__(
        self,
        issued: Callable[[dict[str, Any]], None] | None = None,
        begun: Callable[[Any], None] | None = None,
        key: str = "CPU",
        callbacks: bool = False,
    ) -> None:
        self._issued, self._begun, self._notes_callbacks = issued, begun, callbacks
        self._keys = dict.fromkeys(("CPU", key))
        self._lock = threading.Lock()
        # Never emptied. Gloo's worker destroys a Work under its queue's mutex, and with it Python callbacks, for
        # which it needs the GIL; an overridden kernel enqueues with the GIL held. Were ours not the last reference,
        # the two would wait for each other.
        self._works: list[Any] = []
        self._kept: list[Any] = []
        self._drained = 0
        self._library: Any = None
        self._sent: list[tuple[str, int]] = []
        self._reducing, self._callbacks = threading.local(), threading.local()
        self.raise_next: Callable[[], Exception] | None = None

    def install(self) -> None:
        """Override the kernels. Needs ``torch.library.get_kernel``.

        Raises:
            RuntimeError: this torch has no such function.
        """
        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(
                f"torch {torch.__version__} has no torch.library.get_kernel; recording collectives needs torch 2.10 or later"
            )
        self._library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for (name, places), key in itertools.product({**_COLLECTIVES, **_POINT_TO_POINT}.items(), self._keys):
                try:
                    kernel = torch.library.get_kernel(f"c10d::{name}", key)
                except (RuntimeError, ValueError):
                    continue
                recorded = self._recording(kernel, name, places)
                self._library.impl(name, recorded, key, with_keyset=True, allow_override=True)
        if self._issued:
            self._note_reduce_ops()
        if self._notes_callbacks:
            self._note_callbacks()

    @property
    def in_callback(self) -> bool:
        """Whether this thread runs a callback of a future; where that is noted."""
        return bool(getattr(self._callbacks, "depth", 0))

    def drain(self) -> None:
        """Wait until every collective issued so far is over, whether it succeeded or not."""
        for work in self._not_drained():
            with contextlib.suppress(RuntimeError):  # a failed collective is over too
                work.wait()

    def settle(self) -> None:
        """Wait, in a callback too, until the result of every collective issued so far is there, or its error.

        A Work of Gloo ends after the callbacks on its future: in one of them a wait for it would have no end.
        """
        for work in self._not_drained():
            with contextlib.suppress(RuntimeError):
                dist.Work.unbox(work).get_future().wait()

    def _not_drained(self) -> list[Any]:
        with self._lock:
            works, self._drained = self._works[self._drained :], len(self._works)
        return works

    def take_sent(self) -> list[tuple[str, int]]:
        """Return (kernel, bytes that this rank gave) of every collective since the last call, in the order of their start."""
        with self._lock:
            sent, self._sent = self._sent, []
        return sent

    def _recording(self, kernel: Any, name: str, places: _Kernel) -> Callable[..., Any]:
        works, given = self._works if name in _COLLECTIVES else self._kept, places.given

        def recorded(keyset: Any, *args: Any) -> Any:
            with self._lock:
                self._sent.append((name.strip("_"), _bytes(args[given]) if given >= 0 else 0))
                failure, self.raise_next = self.raise_next, None
            if failure is not None:
                raise failure()
            if self._issued and name in _COLLECTIVES:
                self._issued(_fingerprint(name, places, args, getattr(self._reducing, "op", "")))
            result = kernel.call_boxed(keyset, *args)
            work = result[-1] if isinstance(result, (tuple, list)) else result
            with self._lock:
                works.append(work)
            if self._begun and name in _COLLECTIVES:
                self._begun(work)
            return result

        return recorded

    def _note_callbacks(self) -> None:
        """Remember which thread runs a callback that was attached to a future."""
        for name in ("then", "add_done_callback"):
            original = getattr(torch._C.Future, name)

            def attaching(future: Any, callback: Callable[[Any], Any], _original: Any = original) -> Any:
                return _original(future, lambda done: self._within(callback, done))

            setattr(torch._C.Future, name, attaching)

    def _within(self, callback: Callable[[Any], Any], done: Any) -> Any:
        self._callbacks.depth = getattr(self._callbacks, "depth", 0) + 1
        try:
            return callback(done)
        finally:
            self._callbacks.depth -= 1

    def _note_reduce_ops(self) -> None:
        """Remember which operation a call from Python asks for, until its kernel runs: a kernel cannot tell."""
        for name in _REDUCING:
            original = getattr(dist.ProcessGroup, name, None)

            def noting(group: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                asked = next((getattr(arg, "reduceOp", arg) for arg in (*args, *kwargs.values()) if _is_reduce_op(arg)), None)
                op = getattr(asked, "op", asked)
                self._reducing.op = "" if op is None else str(op).rpartition(".")[2]
                try:
                    return _original(group, *args, **kwargs)
                finally:
                    self._reducing.op = ""

            if original:
                setattr(dist.ProcessGroup, name, noting)


def _is_reduce_op(argument: Any) -> bool:
    return isinstance(getattr(argument, "reduceOp", argument), (dist.ReduceOp, dist.ReduceOp.RedOpType))


def _fingerprint(name: str, places: _Kernel, args: tuple[Any, ...], reducing: str) -> dict[str, Any]:
    """Return what all ranks of a group have to agree on: ``what`` they do, in which ``group``, which of its name is ``named``."""
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
    group = dist.ProcessGroup.unbox(boxed)
    words = [name.strip("_").removesuffix("_base"), reducing]
    if name in _ALIKE:
        words += [f"{_count(args[places.given])}", str(_first(args[places.given]).dtype).removeprefix("torch.")]
    if places.root >= 0:
        words.append(f"root {args[places.root]}")
    ranks = dist.distributed_c10d._pg_group_ranks.get(group) or dict.fromkeys(range(group.size()))
    return {"what": " ".join(filter(None, words)), "group": sorted(ranks), "named": group.group_name}


def _first(given: Any) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else _first(given[0])


def _count(given: Any) -> int:
    return given.numel() if isinstance(given, torch.Tensor) else sum(map(_count, given))


def _bytes(given: Any) -> int:
    """Return the bytes of a tensor, or of tensors in lists of lists."""
    if isinstance(given, torch.Tensor):
        if given.is_sparse:
            return _bytes([given._indices(), given._values()])
        return given.numel() * given.element_size()
    return sum(map(_bytes, given))
