"""A collective of a hook that raises on one rank: the first of a step, or a later one.

The first one raises in place of being issued, so that its peers wait until this rank leaves. A
later one is issued before it raises. Peers receive its result and go on, and a hook that swallows
the error issues the collectives after it together with them. The rank does not leave before that
collective has taken place: peers would get an error in some runs, and a result in others.

The number of collectives of a step is the largest of the steps before: of the last ``REMEMBERED``
ones with a collective, since a hook may issue more in its first step than in others. If the step
has fewer, the next step is tried. In the last step that may fail, the first collective does.

If all ranks fail (``drivers/failing_models.py``), the first one is issued too.
"""

import contextlib
import datetime
import threading
from collections import deque
from typing import Any

from conformance.ranks.instruments.failing_collective import unboxed, with_failing_work
from conformance.ranks.instruments.injected import collective_failed

REMEMBERED = 24
_PATIENCE = datetime.timedelta(seconds=10)


class RaisingCollective:
    """Counts the collectives of each backward, and decides which one raises.

    Args:
        succeeding: ``Fault.succeeding``.
        is_issued: the first collective of a step, too, is issued before it raises.
        at_end: its call returns, and its Work ends with the error.

    Attributes:
        raised_at: the number of the collective that has raised, counted from 1; 0 if none has.
    """

    def __init__(
        self, succeeding: int = 0, *, is_issued: bool = False, at_end: bool = False
    ) -> None:
        self._succeeding = succeeding
        self._is_always_issued = is_issued
        self._at_end = at_end
        self._lock = threading.Lock()
        self._is_counting = False
        self._issued = 0
        self._counts: deque[int] = deque(maxlen=REMEMBERED)
        self._place: int | None = None
        self._works: list[Any] = []
        self._taking_place: Any = None
        self.raised_at = 0

    @property
    def is_issued(self) -> bool:
        """Whether the collective that raises is issued before."""
        return self._succeeding != 0 or self._is_always_issued

    def begin_step(self) -> None:
        """Count the collectives of a step; none of them raises."""
        with self._lock:
            self._issued = 0
            self._is_counting = True
            self._place = None

    def arm(self, is_last_attempt: bool) -> None:
        """Let a collective of this step raise.

        Args:
            is_last_attempt: no later step may fail.
        """
        with self._lock:
            self._place = 0 if is_last_attempt else self._place_by_counts()

    def end_step(self) -> None:
        """Count no more collectives: those to come are the trainer's and DDP's."""
        with self._lock:
            self._is_counting = False
            self._place = None
            if self._issued:
                self._counts.append(self._issued)

    def is_due(self) -> bool:
        """Count a collective, and return whether it is the one that raises."""
        with self._lock:
            if not self._is_counting:
                return False
            place = self._issued
            self._issued += 1
            if place != self._place:
                return False
            self._place = None
            self.raised_at = place + 1
            return True

    def fail(self, result: Any, work: Any) -> Any:
        """Raise the error of a collective that is issued, or return a Work that ends with it.

        Args:
            result: of the kernel; it is kept, since nobody else may hold it.
            work: the collective's; None if the kernel has none, or sends to one rank alone.

        Raises:
            Injected: the call is to fail.
        """
        self._works.append(result)
        self._taking_place = work
        if not self._at_end:
            raise collective_failed()
        return with_failing_work(result, self._works, waits=False)

    def settle(self) -> None:
        """Wait until the collective that has raised has taken place.

        A peer may need a message of this rank first, which is never sent: then the wait ends.
        """
        if self._taking_place is not None:
            with contextlib.suppress(RuntimeError):
                unboxed(self._taking_place).wait(_PATIENCE)

    def _place_by_counts(self) -> int | None:
        """Return the place of the collective that raises, or None if steps had none so far."""
        if not self._succeeding:
            return 0
        if not self._counts:
            return None
        last = max(self._counts) - 1
        if self._succeeding < 0 or last < 2:
            return last
        return 1 + (self._succeeding - 1) % (last - 1)
