"""Values that an oracle computes once for a run: all ranks of a group, and several rules, use
them."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from conformance.records.run import Run

# Of a tensor that is kept: larger ones are few, and take more memory than time.
MOST_KEPT = 1 << 14

Value = TypeVar("Value")


class KeptByRun(Generic[Value]):
    """Values by run and key. They are forgotten with their run, and not to be changed."""

    def __init__(self) -> None:
        self._of_runs: WeakKeyDictionary[Run, dict[Hashable, Value]] = WeakKeyDictionary()

    def get(self, run: Run, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of a key, computed if there is none yet."""
        of_run = self._of_runs.setdefault(run, {})
        if key not in of_run:
            of_run[key] = compute()
        return of_run[key]
