"""Clocks go forward for the subject, and for no library."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from conformance.ranks.instruments.clocks import LONGEST, SHORTEST, Clocks

NAMES = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns")


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    module: Any = time
    real = {name: getattr(time, name) for name in NAMES}
    made = Clocks(seed=1, rank=0)
    made.install()
    yield made
    for name, function in real.items():
        setattr(module, name, function)


@pytest.mark.parametrize("name", NAMES)
def test_time_passes_between_steps(name: str, clocks: Clocks) -> None:
    clock = getattr(time, name)
    unit = 1e9 if name.endswith("_ns") else 1
    before = clock()
    clocks.go_forward()
    passed = (clock() - before) / unit
    assert SHORTEST <= passed <= LONGEST + 60
    assert isinstance(clock(), int) == name.endswith("_ns")


def test_the_library_has_the_real_time(clocks: Clocks) -> None:
    for _ in range(20):
        clocks.go_forward()
    record = logging.LogRecord("", 0, "", 0, "", None, None)
    # The time that this test reads is hours ahead of the time of a record.
    assert time.time() - record.created > 60


def test_ranks_have_draws_of_their_own() -> None:
    passed = []
    for rank in range(3):
        one = Clocks(seed=5, rank=rank)
        one.go_forward()
        passed.append(one.passed)
    assert len(set(passed)) == 3
    again = Clocks(seed=5, rank=1)
    again.go_forward()
    assert again.passed == passed[1]
