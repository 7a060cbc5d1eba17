"""Process groups that are made one after another, each with the ``id()`` of the one before.

Python gives the address of an object that has ended to a later one of the same size, now and then.
A subject that keeps values of groups by ``id(group)`` then has those of a group that has ended. The
kit causes it: it occupies the address with an object of the same size, and frees it right before
torch makes the object of the next group.
"""

import gc
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Their addresses are taken from the same list as those of groups.
_OTHER_OBJECT = dist.AllreduceOptions
_MOST_OBJECTS = 100_000


class _StandIn(type):
    """A class in place of torch's ProcessGroup, which frees the address before it makes a group."""

    def __new__(cls, held: list[Any], real: Any) -> Any:
        return super().__new__(cls, "ProcessGroup", (), {"held": held, "real": real})

    def __init__(cls, held: list[Any], real: Any) -> None:
        super().__init__("ProcessGroup", (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.held.clear()
        return cls.real(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(vars(cls)["real"], name)


class GroupsWithOneId:
    """Makes process groups, one at a time; all ranks of WORLD call it alike."""

    _last = 0

    def make(self, ranks: tuple[int, ...]) -> Any:
        """Return a new group of these ranks; torch's object for "no member" on another rank."""
        others = self._occupy()
        held = others[-1:]
        if held:
            others.pop()
        real = distributed_c10d.ProcessGroup
        distributed_c10d.ProcessGroup = _StandIn(held, real)  # type: ignore[assignment, misc]
        try:
            return dist.new_group(list(ranks))
        finally:
            distributed_c10d.ProcessGroup = real  # type: ignore[misc]

    def has_last_id(self, group: Any) -> bool:
        """Whether a group has the id of the one before."""
        return id(group) == self._last

    def end(self, group: Any) -> None:
        """End a group of this rank; nothing else may refer to it by then."""
        gc.collect()
        self._last = id(group)
        dist.destroy_process_group(group)

    def _occupy(self) -> list[Any]:
        """Return objects, the last of which has the address of the group that has ended."""
        others: list[Any] = []
        while self._last and len(others) < _MOST_OBJECTS:
            others.append(_OTHER_OBJECT())
            if id(others[-1]) == self._last:
                return others
        return []
