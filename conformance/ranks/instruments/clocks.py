"""Clocks that differ between ranks, for the subject alone. Runs in ranks only.

The functions of the module ``time``, ``timeit.default_timer`` and the classes of the module
``datetime`` are replaced before the subject is imported. Code of the kit, of torch and of Python's
own library gets the real time: their waits must not end early.

Time passes twice for each step. Before the step, ``SHORTEST`` to ``LONGEST`` seconds pass. Within
the step, ``SHORTEST_WITHIN`` to ``LONGEST_WITHIN`` seconds pass at once, just before one of the
subject's readings, but not before the first one. So two readings in one step differ by at most
``LONGEST_WITHIN`` more than the real time: a subject may give up after some seconds that it counts
within a step, and must not give up on a rank that computed for an hour between two steps.

The times are stratified: the range of logarithms has as many equal parts as there are steps, and
each rank draws a time from every part, in an order of its own. So two ranks have the same number of
steps in which a period T ends, up to one, and a period shows unless these are the same steps on all
ranks. For a period of half a second, a minute or a day that happens in at most one of a hundred
runs of 16 steps on two ranks.
"""

import itertools
import random
import sys
import sysconfig
import time
import timeit
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from conformance.ranks.instruments.dates import replace_dates

_SECONDS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_NANOSECONDS = tuple(f"{name}_ns" for name in _SECONDS)
_LIBRARY = sysconfig.get_path("stdlib")
_OWN = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_INSTALLED = ("site-packages", "dist-packages")

SHORTEST = 0.01
LONGEST = 10 * 86_400.0
SHORTEST_WITHIN = 0.005
LONGEST_WITHIN = 1.0


class Clocks:
    """The clocks of one rank.

    Args:
        seed: the session's seed.
        rank: the rank, which has draws of its own.
        steps: the number of steps; time passes once for each of them.

    Attributes:
        passed: the seconds that the subject's clocks are ahead.
    """

    def __init__(self, seed: int, rank: int, steps: int) -> None:
        self._numbers = random.Random(f"{seed}/clocks/{rank}")
        self._between = self._draw(SHORTEST, LONGEST, steps)
        self._within = self._draw(SHORTEST_WITHIN, LONGEST_WITHIN, steps)
        self._readings = itertools.count()
        self._passes_at = 0
        self._to_pass = 0.0
        self.passed = 0.0

    def install(self) -> None:
        """Replace the clocks."""
        module: Any = time
        for names, unit in ((_SECONDS, 1.0), (_NANOSECONDS, 1e9)):
            for name in names:
                setattr(module, name, self._clock(getattr(time, name), unit))
        # It is one of them under another name.
        timeit.default_timer = time.perf_counter
        replace_dates(self._ahead)

    def go_forward(self) -> None:
        """Let time pass between two steps, and decide when it passes within the next one."""
        self.passed += self._between.pop()
        self._to_pass = self._within.pop()
        # Before the second reading in half of all steps, the third in a quarter, and so on.
        self._passes_at = 1
        while self._numbers.random() < 1 / 2:
            self._passes_at += 1
        self._readings = itertools.count()

    def _draw(self, shortest: float, longest: float, count: int) -> list[float]:
        """Draw times from equal parts of the range of logarithms, in any order."""
        ratio = longest / shortest
        times = [
            shortest * ratio ** ((part + self._numbers.random()) / count) for part in range(count)
        ]
        self._numbers.shuffle(times)
        return times

    def _clock(self, real: Any, unit: float) -> Any:
        def clock(*args: Any) -> Any:
            now = real(*args)
            return now + type(now)(self._ahead(sys._getframe(1)) * unit)

        clock.__name__ = real.__name__
        return clock

    def _ahead(self, frame: FrameType) -> float:
        """Return by how many seconds the clock that code reads is ahead, and let time pass."""
        if _is_library(frame):
            return 0.0
        if next(self._readings) == self._passes_at:
            self.passed += self._to_pass
        return self.passed


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(_OWN) or path.startswith("<frozen"):
        return True
    return path.startswith(_LIBRARY) and not any(name in path for name in _INSTALLED)
