"""Clocks that differ between ranks, for the subject alone. Runs in ranks only.

The functions of the module ``time`` are replaced before the subject is imported. Code of the kit,
of torch and of Python's own library gets the real time: their waits must not end early.
``datetime.now()`` is written in C, and stays as it is.
"""

import random
import sys
import sysconfig
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_SECONDS = ("time", "monotonic", "perf_counter")
_NANOSECONDS = ("time_ns", "monotonic_ns", "perf_counter_ns")
_LIBRARY = sysconfig.get_path("stdlib")
_OWN = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_INSTALLED = ("site-packages", "dist-packages")

# The time that passes between two steps, drawn evenly from its logarithms. With the probability
# p = ln(LONGEST / T) / ln(LONGEST / SHORTEST) it is T or more, and with 2 p (1 - p) a period of T
# ends in a step on one of two ranks alone. In 16 steps that happens all but surely for a minute,
# and in eleven of twelve runs for two seconds or an hour.
SHORTEST = 1.0
LONGEST = 7200.0


class Clocks:
    """The clocks of one rank.

    Args:
        seed: the session's seed.
        rank: the rank, which has draws of its own.

    Attributes:
        passed: the seconds that the subject's clocks are ahead.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._numbers = random.Random(f"{seed}/clocks/{rank}")
        self.passed = 0.0

    def install(self) -> None:
        """Replace the clocks."""
        module: Any = time
        for names, unit in ((_SECONDS, 1.0), (_NANOSECONDS, 1e9)):
            for name in names:
                setattr(module, name, self._clock(getattr(time, name), unit))

    def go_forward(self) -> None:
        """Let time pass."""
        self.passed += SHORTEST * (LONGEST / SHORTEST) ** self._numbers.random()

    def _clock(self, real: Any, unit: float) -> Any:
        def clock() -> Any:
            now = real()
            return now if _is_library(sys._getframe(1)) else now + type(now)(self.passed * unit)

        clock.__name__ = real.__name__
        return clock


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(_OWN) or path.startswith("<frozen"):
        return True
    return path.startswith(_LIBRARY) and not any(name in path for name in _INSTALLED)
