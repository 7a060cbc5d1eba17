"""The tensors and objects that a long run keeps, at places that are evenly spaced over its steps.

Everything that exists before the subject is imported is frozen, so that the subject's and the
driver's objects are counted. The driver keeps nothing from step to step but in objects that it
names, whose content is left out, and the recorder writes tensors to a file. So the counts of a
right subject are equal to the last object, as soon as its caches are full. Sizes of the process are
not: the C library's caches drift by half a KiB a step.
"""

import gc
import os
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.instruments import process_state
from conformance.ranks.instruments.process_settings import FrozenObjects
from conformance.records.recorder import Recorder

INTERVALS = 40
_READINGS = 4  # more than one, if tensors have grown
# Beyond so many nodes a graph is not followed: a right step has less than a tenth.
_MOST_NODES = 20_000
_CONTAINERS = (list, dict, set, deque, bytearray)
# A history of so many entries is full after some thousand steps, and a long run has some hundred.
_LONGEST_HISTORY = 4096
_LONGEST_ENTRY = 32


class KeptRecorder:
    """Records the objects in use between the steps of a run.

    Args:
        steps: the number of steps.
        recorder: receives the events, and spools its tensors from here on.
        store: of the process groups. Its keys are counted if it is a file, which no other run uses.
    """

    def __init__(self, steps: int, recorder: Recorder, store: dist.Store) -> None:
        self._places = {place * (steps - 1) // INTERVALS for place in range(INTERVALS + 1)}
        self._recorder = recorder
        self._store = store if isinstance(store, dist.FileStore) else None
        self._last: dict[str, int] = {}
        recorder.spool()
        # Collections leave out frozen objects: one takes less than 1 ms.
        gc.collect()
        FrozenObjects.freeze()

    def before(self, step: int, keepers: Iterable[object] = ()) -> None:
        """Record the objects in use before a step, if it is one of the places.

        Args:
            step: the number of the step.
            keepers: objects of the kit whose content is not counted.
        """
        if step in self._places:
            keys = self._store.num_keys() if self._store else 0
            self._recorder.event("kept", at=step, keys=keys, **self._settled(keepers))

    def _settled(self, keepers: Iterable[object]) -> dict[str, int]:
        """Return the counts; if tensors have grown since the last place, the least of more.

        The threads of a process group let go of a collective's tensors a little after its wait().
        """
        counts = kept(keepers)
        for _ in range(_READINGS):
            if all(counts[name] <= self._last.get(name, -1) for name in ("tensors", "bytes")):
                break
            os.sched_yield()
            again = kept(keepers)
            counts = {name: min(count, again[name]) for name, count in counts.items()}
        self._last = counts
        return counts


def kept(keepers: Iterable[object] = ()) -> dict[str, int]:
    """Return what is in use after garbage has been collected, without frozen objects.

    Containers and tensors that ``keepers`` hold are left out, and the entries of histories: what a
    deque of bounded length holds, and nothing else.

    - ``tensors``: tensors that Python can reach;
    - ``bytes``: the bytes of their storages;
    - ``nodes``: nodes of autograd that these tensors can reach;
    - ``objects``: other objects that the garbage collector knows;
    - ``entries``: elements of lists, dicts, sets, deques and byte arrays;
    - ``files``: files in the temporary directory of the rank;
    - ``memory``: bytes in blocks of the C library, of the whole process.
    """
    # Twice: finalizers of the first collection may leave new garbage.
    gc.collect()
    gc.collect()
    memory = process_state.allocated()
    # First of all: a list of all objects would be another owner of the entries.
    entries = _entries_of_histories()
    inside = {**_held_by(keepers), **entries}
    everything = [item for item in gc.get_objects() if id(item) not in inside]
    # isinstance() would read ``__class__``, which raises for a dead weakref.proxy.
    tensors = [item for item in everything if issubclass(type(item), torch.Tensor)]
    # The collector does not know dicts of numbers and strings: their owners have to name them.
    referents = gc.get_referents(*everything)
    unknown = {id(item): item for item in referents if issubclass(type(item), (dict, bytearray))}
    own = {id(everything), id(tensors), id(referents), id(entries), id(inside), *inside}
    containers = {
        id(item): item
        for item in (*everything, *unknown.values())
        if issubclass(type(item), _CONTAINERS) and id(item) not in own and not _is_history(item)
    }
    storages = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return {
        "tensors": len(tensors),
        "bytes": sum(storages.values()),
        "nodes": _nodes(tensors),
        "objects": len(everything) - len(tensors),
        # A subclass may have a ``__len__`` of its own.
        "entries": sum(map(_length, containers.values())),
        "files": len(process_state.files_left()),
        "memory": memory,
    }


def _is_history(item: object) -> bool:
    """Whether an object is a deque that drops its oldest entry for a new one."""
    return type(item) is deque and item.maxlen is not None and item.maxlen <= _LONGEST_HISTORY


def _entries_of_histories() -> dict[int, object]:
    """Return what histories alone hold, by id: their entries, and small things in these."""
    found: dict[int, object] = {}
    waiting: list[object] = [item for item in gc.get_objects() if _is_history(item)]
    while waiting:
        held = gc.get_referents(waiting.pop())
        while held:
            item = held.pop()
            # Its owner, ``item`` and the argument of the call; the collector's list has gone.
            if sys.getrefcount(item) <= 3 and _is_small(item):
                found[id(item)] = item
                waiting.append(item)
    return found


def _is_small(item: Any) -> bool:
    """Whether an object is no container or tensor that could grow in its place, and no graph."""
    if issubclass(type(item), torch.Tensor):
        return item.numel() <= _LONGEST_ENTRY and item.grad_fn is None
    return _length(item) <= _LONGEST_ENTRY


def _held_by(keepers: Iterable[object]) -> dict[int, object]:
    """Return the containers and tensors that objects hold, in containers of theirs too, by id."""
    held: dict[int, object] = {}
    waiting = list(keepers)
    while waiting:
        for item in gc.get_referents(waiting.pop()):
            if issubclass(type(item), (*_CONTAINERS, tuple, torch.Tensor)) and id(item) not in held:
                held[id(item)] = item
                if not issubclass(type(item), torch.Tensor):
                    waiting.append(item)
    return held


def _length(container: Any) -> int:
    for kind in _CONTAINERS:
        if issubclass(type(container), kind):
            return int(kind.__len__(container))
    return 0


def _nodes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of nodes of the graphs that tensors belong to."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        more = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= more
        waiting += more
    return len(seen)
