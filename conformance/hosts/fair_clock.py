"""A clock for deadlines that stands still while a busy machine keeps processes from running.

A deadline is for processes that wait for each other for ever, or compute for ever. On a machine
that does other work too, a right subject may need several times as long, most of which its ranks
spend in the queue for a processor. Linux counts this time for each thread
(``/proc/PID/task/TID/schedstat``: nanoseconds on a processor, and nanoseconds in the queue).
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# The clock runs at a twentieth of the usual speed at least, so that a deadline passes on any
# machine: ranks that share two processors with forty other processes get about as much.
SLOWEST = 20.0
_NANO = 1e-9


def seconds_in_queue(pid: int) -> float:
    """Return how long the threads of a process were ready to run, and no processor was free.

    It is 0 for a process that has ended, and on a kernel that does not count this time.
    """
    waited = 0
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited += int((thread / "schedstat").read_text().split()[1])
    return waited * _NANO


class FairClock:
    """Seconds that pass while no watched process waits for a processor.

    Args:
        pids: the processes.
        now: the time in seconds, of a clock that only goes forward.
        in_queue: the time that a process has spent in the queue so far.
    """

    def __init__(
        self,
        pids: Iterable[int],
        now: Callable[[], float] = time.monotonic,
        in_queue: Callable[[int], float] = seconds_in_queue,
    ) -> None:
        self._now = now
        self._in_queue = in_queue
        self._last = now()
        self._waits = {pid: in_queue(pid) for pid in pids}
        self._seconds = 0.0

    def read(self) -> float:
        """Return the seconds since the clock was made, without those in which the process that
        waited longest for a processor was waiting for it.
        """
        now = self._now()
        passed = now - self._last
        self._last = now
        longest = 0.0
        for pid, before in self._waits.items():
            self._waits[pid] = self._in_queue(pid)
            longest = max(longest, self._waits[pid] - before)
        self._seconds += max(passed - longest, passed / SLOWEST)
        return self._seconds
