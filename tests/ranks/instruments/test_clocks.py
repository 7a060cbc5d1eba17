"""Clocks go forward for the subject, and for no library."""

import copy
import datetime
import logging
import pickle
import time
import timeit
from itertools import pairwise

import pytest

from conformance.ranks.instruments.clocks import (
    LONGEST,
    LONGEST_WITHIN,
    SHORTEST,
    SHORTEST_WITHIN,
    Clocks,
)

SECONDS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
NAMES = (*SECONDS, *(f"{name}_ns" for name in SECONDS))
STEPS = 16


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    # So that they are restored.
    for name in (*NAMES, "clock_gettime", "clock_gettime_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))
    monkeypatch.setattr(timeit, "default_timer", timeit.default_timer)
    for name in ("datetime", "date"):
        monkeypatch.setattr(datetime, name, getattr(datetime, name))
    made = Clocks(seed=1, rank=0, steps=STEPS)
    made.install()
    return made


@pytest.mark.parametrize("name", NAMES)
def test_time_passes_between_steps(name: str, clocks: Clocks) -> None:
    clock = getattr(time, name)
    unit = 1e9 if name.endswith("_ns") else 1
    before = clock()
    clocks.go_forward()
    passed = (clock() - before) / unit
    assert SHORTEST <= passed <= LONGEST + 60
    assert isinstance(clock(), int) == name.endswith("_ns")


def test_time_passes_for_dates(clocks: Clocks) -> None:
    clocks.passed = LONGEST
    real = datetime.datetime.fromtimestamp(time.time() - LONGEST)
    aware = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
    for now in (datetime.datetime.now(), datetime.datetime.utcnow(), aware):
        assert datetime.timedelta(days=8) < now - real < datetime.timedelta(days=12)
    assert datetime.timedelta(days=8) < datetime.date.today() - real.date()
    assert datetime.datetime.today() > real


def test_dates_are_those_of_python(clocks: Clocks) -> None:
    of_c = datetime.datetime.__base__
    assert of_c is not None

    class Own(datetime.datetime):
        """A class of the subject's own."""

    now = datetime.datetime.now()
    made = of_c(2026, 11, 27, 1)  # type: ignore[call-arg]
    assert isinstance(made, datetime.datetime)
    assert isinstance(made, datetime.date)
    assert isinstance(now, of_c)
    assert issubclass(of_c, datetime.datetime)
    assert isinstance(now, datetime.date)
    assert not isinstance(1.0, datetime.date)
    assert isinstance(Own.now(), Own)
    assert not isinstance(now, Own)
    assert issubclass(Own, datetime.datetime)
    assert not issubclass(datetime.datetime, Own)
    for one in (now, datetime.date.today()):
        assert pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one)
        assert type(pickle.loads(pickle.dumps(one))) is type(one)
    assert type(now + datetime.timedelta(days=1)) is datetime.datetime
    assert datetime.datetime.fromisoformat("2026-11-27T01:00:00") == made
    assert datetime.datetime.strptime("27.11.2026 1", "%d.%m.%Y %H") == made
    assert datetime.datetime.combine(datetime.date(2026, 11, 27), datetime.time(1)) == made


def test_other_names_of_clocks(clocks: Clocks) -> None:
    clocks.go_forward()
    clocks.passed = LONGEST
    assert timeit.default_timer is time.perf_counter
    assert time.clock_gettime(time.CLOCK_MONOTONIC) - time.monotonic() < 60
    assert time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1e9 - time.monotonic() < 60


def test_time_passes_once_within_a_step_but_not_before_the_first_reading(clocks: Clocks) -> None:
    for _ in range(STEPS):
        clocks.go_forward()
        ahead = [clocks.passed]
        for _ in range(60):
            time.monotonic()
            ahead.append(clocks.passed)
        assert ahead[1] == ahead[0]
        passed = [after - before for before, after in pairwise(ahead) if after != before]
        assert len(passed) == 1
        assert SHORTEST_WITHIN * 0.99 <= passed[0] <= LONGEST_WITHIN * 1.01


def test_the_library_has_the_real_time(clocks: Clocks) -> None:
    for _ in range(STEPS):
        clocks.go_forward()
    record = logging.LogRecord("", 0, "", 0, "", None, None)
    # The time that this test reads is days ahead of the time of a record.
    assert time.time() - record.created > 60


@pytest.mark.parametrize("period", [0.05, 0.5, 60.0, 3600.0, 86_400.0])
def test_periods_end_in_other_steps_on_another_rank(period: float) -> None:
    alike = 0
    for seed in range(300):
        steps = []
        for rank in range(2):
            clocks = Clocks(seed, rank, STEPS)
            ahead = [0.0]
            for _ in range(STEPS):
                clocks.go_forward()
                ahead.append(clocks.passed)
            steps.append([after - before >= period for before, after in pairwise(ahead)])
            assert 0 < sum(steps[-1]) < STEPS
        alike += steps[0] == steps[1]
    assert alike <= 300 * (0.1 if period < 0.5 else 0.02)


def test_ranks_have_draws_of_their_own() -> None:
    passed = []
    for rank in range(3):
        one = Clocks(seed=5, rank=rank, steps=STEPS)
        one.go_forward()
        passed.append(one.passed)
    assert len(set(passed)) == 3
    again = Clocks(seed=5, rank=1, steps=STEPS)
    again.go_forward()
    assert again.passed == passed[1]
