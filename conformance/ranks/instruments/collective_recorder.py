"""Recording of collectives: each one that this rank issues, from any thread, with its Work.

The recorder overrides the kernels of ``c10d::*`` in this process, for the CPU's key and the key of
the run's device. So it sees direct calls of a process group, callbacks on other threads, and C++
alike. Groups that are written in Python never reach these kernels: their methods are wrapped
(``python_groups.py``). Both die with the rank.
"""

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.instruments.failing_collective import FailingCollective, unboxed
from conformance.ranks.instruments.injected import collective_failed
from conformance.ranks.instruments.peer_death import PeerDeath
from conformance.ranks.instruments.python_groups import Method, root_of, wrap_python_groups
from conformance.ranks.instruments.raising_collective import RaisingCollective
from conformance.ranks.instruments.schedule import Schedule
from conformance.ranks.instruments.subject_calls import SubjectCalls
from conformance.records.recorder import Recorder
from conformance.torch_versions.private import (
    ALLGATHER_BASE,
    REDUCE_SCATTER_BASE,
    AnyFuture,
    Kernel,
    known_groups,
    override_kernel,
    type_of_script_object,
)


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
    f"{ALLGATHER_BASE}_": _Kernel(1),
    "reduce_scatter_": _Kernel(1),
    f"{REDUCE_SCATTER_BASE}_": _Kernel(1),
    "alltoall_": _Kernel(1),
    "alltoall_base_": _Kernel(1),
    "broadcast_": _Kernel(0, root=2),
    "reduce_": _Kernel(0, root=3),
    "gather_": _Kernel(1, root=3),
    "scatter_": _Kernel(1, root=3),
    "barrier": _Kernel(-1),
}
# These are counted and never kept: a Work that its owner has dropped is a send that never ends, and
# would end well if the kit held it.
_POINT_TO_POINT = {"send": _Kernel(0), "recv_": _Kernel(-1)}
# All ranks contribute the same size and dtype to these collectives. They may differ in the others.
_ALIKE = _COLLECTIVES.keys() - {"alltoall_", "alltoall_base_", "gather_", "scatter_", "barrier"}
_REDUCING = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    REDUCE_SCATTER_BASE,
)


class OutsideGroup(RuntimeError):
    """A collective would wait for ranks that do not take part in this step."""


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
        raising: decides which collective raises.
        failing: may let a collective fail that has been issued.
        before_each: called before a collective is issued.
        taking_part: the ranks that take part in the present step; None if all do. A collective of
            a group with other ranks would never end: it is recorded and refused.
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
        self._drained = 0
        self._paused = False
        self._library: Any = None
        self._sent: list[tuple[str, int]] = []
        self._reducing = threading.local()
        # The depth of calls of groups written in Python, which may call others inside.
        self._inside_group = threading.local()
        self._callbacks = threading.local()
        self.peer_death: PeerDeath | None = None
        self.raising = RaisingCollective()
        self.failing: FailingCollective | None = None
        self.before_each: Callable[[], None] | None = None
        self.taking_part: frozenset[int] | None = None

    def install(self, schedule: Schedule) -> None:
        """Override the kernels.

        Args:
            schedule: lets peers in before this rank waits for a serialised collective.
        """
        self._schedule = schedule
        self._library = torch.library.Library("c10d", "IMPL")
        kernels = {**_COLLECTIVES, **_POINT_TO_POINT}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for (name, positions), key in itertools.product(kernels.items(), self._keys):
                wrap = functools.partial(self._recording, name, positions)
                override_kernel(self._library, name, key, wrap)
        wrap_python_groups(self._around_method)
        if self._records or self.peer_death:
            self._note_reduce_ops()
        if self._notes_callbacks:
            self._note_callbacks()

    def pause(self) -> None:
        """Write no events of collectives until :meth:`resume`."""
        self._paused = self._records
        self._records = False

    def resume(self) -> None:
        """Write events again; collectives since :meth:`pause` are over and forgotten."""
        self.drain()
        self.take_sent()
        self._records = self._paused

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
                unboxed(work).get_future().wait()

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

    def _recording(self, name: str, positions: _Kernel, kernel: Kernel) -> Kernel:
        given = positions.given

        def recorded(keyset: Any, *args: Any) -> Any:
            if getattr(self._inside_group, "depth", 0):
                return kernel(keyset, *args)

            def fingerprint() -> dict[str, Any]:
                op = getattr(self._reducing, "op", "")
                root = args[positions.root] if positions.root >= 0 else None
                tensors = args[given] if given >= 0 else None
                return _fingerprint(name, _group_among(args), tensors, root, op)

            size = _bytes(args[given]) if given >= 0 else 0
            # The first argument of each kernel but a barrier's receives the result.
            moved = size if name == "barrier" else max(size, _bytes(args[0]))
            return self._issue(name, size, moved, fingerprint, lambda: kernel(keyset, *args))

        return recorded

    def _around_method(
        self,
        method: Method,
        group: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Any:
        """Record a call of a group that is written in Python."""
        if getattr(self._inside_group, "depth", 0):
            return call()
        values = (*args, *kwargs.values())
        tensors = values[method.given] if method.given >= 0 else None

        def fingerprint() -> dict[str, Any]:
            root = root_of(args, kwargs) if method.rooted else None
            return _fingerprint(method.kernel, group, tensors, root, _reduce_op_among(values))

        def inside() -> Any:
            self._inside_group.depth = 1
            try:
                return call()
            finally:
                self._inside_group.depth = 0

        size = 0 if tensors is None else _bytes(tensors)
        return self._issue(method.kernel, size, size, fingerprint, inside)

    def _issue(
        self,
        name: str,
        size: int,
        moved: int,
        fingerprint: Callable[[], dict[str, Any]],
        call: Callable[[], Any],
    ) -> Any:
        """Record a collective, make the call, and keep its Work.

        Args:
            name: the name of the kernel.
            size: the bytes that this rank contributes.
            moved: the bytes that it contributes or receives, whichever are more.
            fingerprint: returns the properties on which ranks have to agree.
            call: makes the call.
        """
        is_collective = name in _COLLECTIVES
        with self._lock:
            self._sent.append((name.strip("_"), size))
        raises = self.raising.is_due()
        if raises and not self.raising.is_issued:
            raise collective_failed()
        if self.before_each is not None:
            self.before_each()
        is_recorded = self._records or bool(self.peer_death)
        if is_collective and (is_recorded or self.taking_part is not None):
            properties = fingerprint()
            if is_recorded:
                self._record(properties)
            self._require_taking_part(properties)
        result = call()
        work = result[-1] if isinstance(result, (tuple, list)) else result
        if is_collective and work is not None:
            with self._lock:
                self._works.append(work)
            if self._serialises:
                self._wait_for(work)
        if raises:
            return self.raising.fail(result, work if is_collective else None)
        return self.failing.pass_on(name, moved, result) if self.failing else result

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

    def _require_taking_part(self, fingerprint: dict[str, Any]) -> None:
        """Refuse a collective that waits for a rank that takes no part.

        Raises:
            OutsideGroup: there is such a rank.
        """
        if self.taking_part is None or self.taking_part >= set(fingerprint["group"]):
            return
        missing = sorted(set(fingerprint["group"]) - self.taking_part)
        self._recorder.event("foreign", missing=missing, **fingerprint)
        raise OutsideGroup(
            f"{fingerprint['what']} on ranks {_listed(fingerprint['group'])}, but the model is on "
            f"ranks {_listed(sorted(self.taking_part))} alone: rank {_listed(missing)} takes no "
            "part, and the collective would never end"
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
            original = getattr(AnyFuture, name)

            def attaching(
                future: Any, callback: Callable[[Any], Any], _original: Any = original
            ) -> Any:
                return _original(future, lambda done: self._within(callback, done))

            setattr(AnyFuture, name, attaching)

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
                self._reducing.op = _reduce_op_among((*args, *kwargs.values()))
                try:
                    return _original(group, *args, **kwargs)
                finally:
                    self._reducing.op = ""

            if original:
                setattr(dist.ProcessGroup, name, noting)


def _reduce_op_among(arguments: Iterable[Any]) -> str:
    """Return the name of the reduce operation among the arguments of a call; '' without one."""
    options = next(filter(_is_reduce_op, arguments), None)
    reduce_op = getattr(options, "reduceOp", options)
    op = getattr(reduce_op, "op", reduce_op)
    return "" if op is None else str(op).rpartition(".")[2]


def _is_reduce_op(argument: Any) -> bool:
    reduce_op = getattr(argument, "reduceOp", argument)
    return isinstance(reduce_op, (dist.ReduceOp, dist.ReduceOp.RedOpType))


def _group_among(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the process group among the arguments of a kernel."""
    boxed = next(
        arg
        for arg in args
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in type_of_script_object(arg)
    )
    return dist.ProcessGroup.unbox(boxed)


def _fingerprint(
    name: str, group: Any, given: Any, root: int | None, reducing: str
) -> dict[str, Any]:
    """Return the properties of a collective on which all ranks of its group have to agree.

    Args:
        name: the name of the kernel.
        group: the process group.
        given: the tensors that this rank contributes; None if there are none.
        root: the root; None if there is none.
        reducing: the name of the reduce operation; '' if there is none.

    Returns:
        ``what``: the collective, its reduce operation, size, dtype and root; ``group``: the ranks
        of the group; ``named``: the group's name, since several groups may have the same ranks.
    """
    parts = [name.strip("_").removesuffix("_base"), reducing]
    if name in _ALIKE and given is not None:
        parts.append(str(_count(given)))
        parts.append(str(_first(given).dtype).removeprefix("torch."))
    if root is not None:
        parts.append(f"root {root}")
    ranks = known_groups().pg_group_ranks.get(group) or dict.fromkeys(range(group.size()))
    return {
        "what": " ".join(filter(None, parts)),
        "group": sorted(ranks),
        "named": group.group_name,
    }


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


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
