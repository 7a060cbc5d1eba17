"""Records the collectives that Python code starts during a training run.

A :class:`Recording` describes those of one sampled step. A :class:`Tally` is open for the whole
watch and only counts. While one of them is open, methods of ``ProcessGroup`` are replaced; the last
one to close puts them back. Collectives that C++ code starts by itself, such as DDP's own
allreduce, do not pass through these methods. Works and futures are returned untouched, and none is
kept. The recorder of the ranks (``ranks/instruments/collective_recorder.py``) overrides kernels and
keeps every Work; that suits processes that soon end, and not a training run.
"""

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from conformance.torch_versions.private import ALLGATHER_BASE, REDUCE_SCATTER_BASE


class _Method(NamedTuple):
    """A method of ``ProcessGroup``.

    Attributes:
        input: the position of the argument with this rank's tensors, if all ranks of the group give
            equal amounts of one dtype; None if they need not.
        has_root: whether the call names a root rank.
    """

    input: int | None
    has_root: bool = False


# Sends and receives are left out: they have no group of ranks that must agree.
_METHODS = {
    "allreduce": _Method(0),
    "allreduce_coalesced": _Method(0),
    "broadcast": _Method(0, has_root=True),
    "reduce": _Method(0, has_root=True),
    "allgather": _Method(1),
    "allgather_coalesced": _Method(1),
    "all_gather_single": _Method(1),
    ALLGATHER_BASE: _Method(1),
    "reduce_scatter": _Method(1),
    "reduce_scatter_single": _Method(1),
    REDUCE_SCATTER_BASE: _Method(1),
    "alltoall": _Method(None),
    "all_to_all_single": _Method(None),
    "alltoall_base": _Method(None),
    "gather": _Method(None),
    "scatter": _Method(None),
    "barrier": _Method(None),
}
MAX_RECORDED = 10_000  # collectives of one step that are kept


class Collective(NamedTuple):
    """One collective that a rank started.

    Attributes:
        description: the properties on which all ranks of the group must agree, in words.
        ranks: the ranks of the group.
        group_name: the name of the group.
    """

    description: str
    ranks: list[int]
    group_name: str


_lock = threading.RLock()
_open: list["_Observer"] = []
_originals: dict[str, Any] = {}
# Names of the kit's own groups, whose collectives are not recorded.
kit_groups: set[str] = set()


class _Observer:
    """Sees the collectives that this process starts between :meth:`open` and :meth:`close`."""

    def open(self) -> None:
        with _lock:
            if not _open:
                _replace_methods()
            _open.append(self)

    def close(self) -> None:
        """See no more. Further calls do nothing."""
        with _lock:
            if self in _open:
                _open.remove(self)
                if not _open:
                    _restore_methods()

    def observe(self, name: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each collective, with the arguments of the method ``name``."""
        raise NotImplementedError


class Recording(_Observer):
    """The collectives that this process starts while the recording is open.

    Attributes:
        collectives: each with the thread that started it, in the order in which they were started.
    """

    def __init__(self) -> None:
        self.collectives: list[tuple[int, Collective]] = []

    def observe(self, name: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(self.collectives) < MAX_RECORDED:
            ranks = sorted(dist.get_process_group_ranks(group))
            collective = Collective(_describe(name, args, kwargs), ranks, group.group_name)
            self.collectives.append((threading.get_ident(), collective))


class Counted(NamedTuple):
    """One collective, as a tally knows it.

    Attributes:
        method: the method of ``ProcessGroup``.
        number: its number among the collectives of its group, counted from 1.
        group_name: the name of the group.
    """

    method: str
    number: int
    group_name: str


class Tally(_Observer):
    """Counts the collectives that this process starts while the tally is open, by group.

    A collective takes 2 to 3 microseconds more. Only the following is kept.

    Attributes:
        latest: the collective that was started last; None if there was none.
        counts: how many were started, by the name of the group.
    """

    def __init__(self) -> None:
        self.latest: Counted | None = None
        self.counts: dict[str, int] = {}
        # Several threads may count at the same time; next() is atomic.
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))

    def observe(self, name: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group_name = group.group_name
        number = next(self._numbers[group_name])
        self.counts[group_name] = number
        self.latest = Counted(name, number, group_name)


def _replace_methods() -> None:
    for name in _METHODS:
        # Versions of torch have different methods.
        if original := dist.ProcessGroup.__dict__.get(name):
            _originals[name] = original
            setattr(dist.ProcessGroup, name, _recording_method(name, original))


def _restore_methods() -> None:
    for name, original in _originals.items():
        setattr(dist.ProcessGroup, name, original)
    _originals.clear()


def _recording_method(name: str, original: Any) -> Callable[..., Any]:
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        # A group or a call of an unknown form is not recorded; the call itself must not fail.
        with contextlib.suppress(Exception):
            if group.group_name not in kit_groups:
                for observer in list(_open):
                    observer.observe(name, group, args, kwargs)
        return original(group, *args, **kwargs)

    return method


def _describe(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the properties on which all ranks of a group must agree, in words."""
    method = _METHODS[name]
    values = (*args, *kwargs.values())
    words = [name]
    operation = _operation(values)
    if operation is not None:
        words.append(str(getattr(operation, "op", operation)).rpartition(".")[2])
    if method.input is not None and len(args) > method.input:
        tensors = _tensors(args[method.input])
        words.append(str(sum(tensor.numel() for tensor in tensors)))
        if tensors:
            words.append(str(tensors[0].dtype).removeprefix("torch."))
    if method.has_root:
        roots = [value.rootRank for value in values if hasattr(value, "rootRank")]
        if roots:
            words.append(f"root {roots[0]}")
    return " ".join(filter(None, words))


def _operation(values: tuple[Any, ...]) -> Any:
    """Return the reduction operation of a call: of its options, or an argument of its own."""
    for value in values:
        if hasattr(value, "reduceOp"):
            return value.reduceOp
    for value in values:
        if isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return value
    return None


def _tensors(given: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for part in given for tensor in _tensors(part)]
