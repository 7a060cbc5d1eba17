"""Recording of collectives: each one that this rank issues, from any thread, with its Work.

The recorder overrides the kernels of ``c10d::*`` in this process, for the CPU's key and the key of
the run's device. So it sees direct calls of a process group, callbacks on other threads, and C++
alike. The override dies with the rank.
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

from conformance.ranks.instruments.peer_death import PeerDeath
from conformance.ranks.instruments.schedule import Schedule
from conformance.ranks.instruments.subject_calls import SubjectCalls
from conformance.records.recorder import Recorder


@dataclass(frozen=True)
class _Kernel:
    """The positions of a kernel's arguments.

    Attributes:
        given: the tensors that this rank contributes; -1 if there are none.
        root: the root; -1 if there is none.
    """

    given: int
    root: int = -1


_COLLECTIVES = {
    "allreduce_": _Kernel(0),
    "allreduce_coalesced_": _Kernel(0),
    "allgather_": _Kernel(1),
    "_allgather_base_": _Kernel(1),
    "reduce_scatter_": _Kernel(1),
    "_reduce_scatter_base_": _Kernel(1),
    "alltoall_": _Kernel(1),
    "alltoall_base_": _Kernel(1),
    "broadcast_": _Kernel(0, root=2),
    "reduce_": _Kernel(0, root=3),
    "gather_": _Kernel(1, root=3),
    "scatter_": _Kernel(1, root=3),
    "barrier": _Kernel(-1),
}
# These are kept, but never drained: on Gloo a second wait for a receive does not end.
_POINT_TO_POINT = {"send": _Kernel(0), "recv_": _Kernel(-1)}
# All ranks contribute the same size and dtype to these collectives. They may differ in the others.
_ALIKE = _COLLECTIVES.keys() - {"alltoall_", "alltoall_base_", "gather_", "scatter_", "barrier"}
_REDUCING = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
)


class CollectiveRecorder:
    """Keeps the collectives of this process and the sizes of their inputs.

    Args:
        recorder: receives a ``collective`` event for each collective before it begins.
        calls: the calls into the subject.
        key: the key under which torch keeps kernels for the run's device.
        records: write these events.
        serialises: wait for each collective before the call that issues it returns.
        notes_callbacks: note which collectives are issued by callbacks of futures.

    Attributes:
        peer_death: receives the collectives instead of the recorder.
        raise_next: makes the exception that the next collective raises.
    """

    def __init__(
        self,
        recorder: Recorder,
        calls: SubjectCalls,
        key: str = "CPU",
        *,
        records: bool = False,
        serialises: bool = False,
        notes_callbacks: bool = False,
    ) -> None:
        self._recorder = recorder
        self._calls = calls
        self._records = records
        self._serialises = serialises
        self._notes_callbacks = notes_callbacks
        self._keys = dict.fromkeys(("CPU", key))
        self._schedule: Schedule | None = None
        self._lock = threading.Lock()
        # Never emptied. Gloo's worker destroys a Work under its queue's mutex, and with it Python
        # callbacks, for which it needs the GIL; an overridden kernel enqueues with the GIL held.
        # If this list did not hold the last reference, the two would wait for each other.
        self._works: list[Any] = []
        self._kept: list[Any] = []
        self._drained = 0
        self._library: Any = None
        self._sent: list[tuple[str, int]] = []
        self._reducing = threading.local()
        self._callbacks = threading.local()
        self.peer_death: PeerDeath | None = None
        self.raise_next: Callable[[], Exception] | None = None

    def install(self, schedule: Schedule) -> None:
        """Override the kernels. Needs ``torch.library.get_kernel``.

        Args:
            schedule: lets peers in before this rank waits for a serialised collective.

        Raises:
            RuntimeError: this torch has no such function.
        """
        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(
                f"torch {torch.__version__} has no torch.library.get_kernel; "
                "recording collectives needs torch 2.10 or later"
            )
        self._schedule = schedule
        self._library = torch.library.Library("c10d", "IMPL")
        kernels = {**_COLLECTIVES, **_POINT_TO_POINT}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for (name, positions), key in itertools.product(kernels.items(), self._keys):
                try:
                    kernel = torch.library.get_kernel(f"c10d::{name}", key)
                except (RuntimeError, ValueError):
                    continue
                recorded = self._recording(kernel, name, positions)
                self._library.impl(name, recorded, key, with_keyset=True, allow_override=True)
        if self._records or self.peer_death:
            self._note_reduce_ops()
        if self._notes_callbacks:
            self._note_callbacks()

    def drain(self) -> None:
        """Wait until every collective issued so far is over, whether it succeeded or not."""
        for work in self._not_drained():
            with contextlib.suppress(RuntimeError):  # a failed collective is over too
                work.wait()

    def settle(self) -> None:
        """Wait, in a callback too, until each collective issued so far has a result or an error.

        A Work of Gloo ends after the callbacks on its future: a wait for the Work inside one of
        these callbacks would never end.
        """
        for work in self._not_drained():
            with contextlib.suppress(RuntimeError):
                dist.Work.unbox(work).get_future().wait()

    def _not_drained(self) -> list[Any]:
        with self._lock:
            works = self._works[self._drained :]
            self._drained = len(self._works)
        return works

    def take_sent(self) -> list[tuple[str, int]]:
        """Return (kernel, bytes given) of each collective since the last call, in their order."""
        with self._lock:
            sent = self._sent
            self._sent = []
        return sent

    def _recording(self, kernel: Any, name: str, positions: _Kernel) -> Callable[..., Any]:
        is_collective = name in _COLLECTIVES
        works = self._works if is_collective else self._kept
        given = positions.given

        def recorded(keyset: Any, *args: Any) -> Any:
            with self._lock:
                self._sent.append((name.strip("_"), _bytes(args[given]) if given >= 0 else 0))
                failure = self.raise_next
                self.raise_next = None
            if failure is not None:
                raise failure()
            if is_collective and (self._records or self.peer_death):
                op = getattr(self._reducing, "op", "")
                self._record(_fingerprint(name, positions, args, op))
            result = kernel.call_boxed(keyset, *args)
            work = result[-1] if isinstance(result, (tuple, list)) else result
            with self._lock:
                works.append(work)
            if is_collective and self._serialises:
                self._wait_for(work)
            return result

        return recorded

    def _record(self, fingerprint: dict[str, Any]) -> None:
        """Record a collective before it begins, since it may never end."""
        if self.peer_death:
            self.peer_death.issued(fingerprint)
            return
        self._recorder.event(
            "collective",
            call=self._calls.last,
            inside=self._calls.issues,
            callback=bool(getattr(self._callbacks, "depth", 0)),
            **fingerprint,
        )

    def _wait_for(self, work: Any) -> None:
        """Wait until a collective is over, for a hook that is judged with one at a time."""
        assert self._schedule is not None
        # The schedule cannot see this wait: the boxed Work has a method of its own.
        self._schedule.let_go()
        with contextlib.suppress(RuntimeError):  # the hook's own wait raises the error again
            work.wait()

    def _note_callbacks(self) -> None:
        """Remember which threads run a callback that was attached to a future."""
        for name in ("then", "add_done_callback"):
            original = getattr(torch._C.Future, name)

            def attaching(
                future: Any, callback: Callable[[Any], Any], _original: Any = original
            ) -> Any:
                return _original(future, lambda done: self._within(callback, done))

            setattr(torch._C.Future, name, attaching)

    def _within(self, callback: Callable[[Any], Any], done: Any) -> Any:
        self._callbacks.depth = getattr(self._callbacks, "depth", 0) + 1
        try:
            return callback(done)
        finally:
            self._callbacks.depth -= 1

    def _note_reduce_ops(self) -> None:
        """Remember the reduce operation of a call from Python, which its kernel cannot read."""
        for name in _REDUCING:
            original = getattr(dist.ProcessGroup, name, None)

            def noting(group: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                reducing = filter(_is_reduce_op, (*args, *kwargs.values()))
                options = next(reducing, None)
                reduce_op = getattr(options, "reduceOp", options)
                op = getattr(reduce_op, "op", reduce_op)
                self._reducing.op = "" if op is None else str(op).rpartition(".")[2]
                try:
                    return _original(group, *args, **kwargs)
                finally:
                    self._reducing.op = ""

            if original:
                setattr(dist.ProcessGroup, name, noting)


def _is_reduce_op(argument: Any) -> bool:
    reduce_op = getattr(argument, "reduceOp", argument)
    return isinstance(reduce_op, (dist.ReduceOp, dist.ReduceOp.RedOpType))


def _fingerprint(
    name: str, positions: _Kernel, args: tuple[Any, ...], reducing: str
) -> dict[str, Any]:
    """Return the properties of a collective on which all ranks of its group have to agree.

    Returns:
        ``what``: the collective, its reduce operation, size, dtype and root; ``group``: the ranks
        of the group; ``named``: the group's name, since several groups may have the same ranks.
    """
    boxed = next(
        arg
        for arg in args
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
    )
    group = dist.ProcessGroup.unbox(boxed)
    parts = [name.strip("_").removesuffix("_base"), reducing]
    if name in _ALIKE:
        given = args[positions.given]
        parts.append(str(_count(given)))
        parts.append(str(_first(given).dtype).removeprefix("torch."))
    if positions.root >= 0:
        parts.append(f"root {args[positions.root]}")
    ranks = dist.distributed_c10d._pg_group_ranks.get(group) or dict.fromkeys(range(group.size()))
    return {
        "what": " ".join(filter(None, parts)),
        "group": sorted(ranks),
        "named": group.group_name,
    }


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
