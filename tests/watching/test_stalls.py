"""The warning about ranks that stand still, with two ranks as threads of one process."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.watching.stalls import LOOKS, StallReporter, describe

pytestmark = pytest.mark.ranks


@dataclass
class Ranks:
    """The part of an exchange that a reporter uses."""

    rank: int
    store: dist.Store
    size: int = 2
    ranks: tuple[int, ...] = (0, 1)
    model_group: str = "model"

    def open_store(self) -> dist.Store:
        return self.store


@dataclass
class Training:
    """A thread that trains; it stands still at an event, or moves."""

    moves: bool
    end: threading.Event = field(default_factory=threading.Event)
    steps: int = 0

    def run(self) -> None:
        while self.moves and not self.end.is_set():
            self.steps += 1
            time.sleep(0.01)
        self.end.wait()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counting(training: Training, looked: threading.Event) -> Callable[[], int]:
    """Return a function that returns the steps; set ``looked`` after three times as many looks as a
    warning needs.
    """
    looks = itertools.count(1)

    def steps() -> int:
        if next(looks) > 3 * LOOKS:
            looked.set()
        return training.steps

    return steps


def warnings_of(
    trainings: list[Training], caplog: Any, extra_barrier: bool, is_expected: bool = False
) -> list[str]:
    """Return the warnings while two ranks train; rank 1 may issue one collective more."""
    store = dist.HashStore()
    caplog.set_level(logging.INFO, "conformance.watch")
    reporters = []
    looked = [threading.Event() for _ in trainings]
    for rank, training in enumerate(trainings):
        thread = threading.Thread(target=training.run)
        thread.start()
        reporter = StallReporter(
            Ranks(rank, store),  # type: ignore[arg-type]
            0.3,
            counting(training, looked[rank]),
            lambda thread=thread: thread.ident or 0,  # type: ignore[misc]
        )
        reporter._tally.counts["model"] = 7 + (extra_barrier and rank == 1)
        reporters.append(reporter)
        reporter.start()
    if is_expected:
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        # Each rank has looked often enough for several warnings.
        assert all(event.wait(60) for event in looked)
    for reporter in reporters:
        reporter.stop()
    # A place that stayed in the store after the watch could be read as that of a later moment.
    deadline = time.monotonic() + 60
    while store.check(["place/1"]) and store.get("place/1") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (store.check(["place/1"]) and store.get("place/1"))
    for training in trainings:
        training.end.set()
    return [record.getMessage() for record in caplog.records]


def test_ranks_that_stand_still_at_different_collectives(caplog: Any) -> None:
    trainings = [Training(moves=False), Training(moves=False)]
    [line] = warnings_of(trainings, caplog, extra_barrier=True, is_expected=True)
    first, rank_0, rank_1 = line.splitlines()
    assert first == "no rank of the model's group has moved for 0.3 s:"
    assert rank_0.startswith("  rank 0: in wait, ")
    assert rank_1.startswith("  rank 1: in wait, ")


def test_a_rank_that_moves_holds_the_warning_back(caplog: Any) -> None:
    trainings = [Training(moves=False), Training(moves=True)]
    assert warnings_of(trainings, caplog, extra_barrier=True) == []


def test_ranks_that_wait_for_no_other(caplog: Any) -> None:
    """For example in a call that writes a file on every rank."""
    trainings = [Training(moves=False), Training(moves=False)]
    assert warnings_of(trainings, caplog, extra_barrier=False) == []


def test_the_warning() -> None:
    places = [
        {"at": "in backward, train.py:7", "steps": 4, "latest": None},
        {"at": "in barrier, train.py:5", "steps": 3, "latest": ["barrier", 1, "0"]},
    ]
    assert describe(places, (0, 3), 60.0).splitlines() == [
        "no rank of the model's group has moved for 60 s:",
        "  rank 0: in backward, train.py:7, after 4 steps; "
        "no collective from Python since the watch began",
        "  rank 3: in barrier, train.py:5, after 3 steps; "
        "latest collective from Python: barrier, number 1 of group 0",
    ]


def test_no_store_is_used_while_a_rank_moves(group: None) -> None:
    """Nothing is sent as long as the training is healthy."""
    ranks = Ranks(0, None)  # type: ignore[arg-type]
    steps = iter(range(10**6))
    reporter = StallReporter(ranks, 0.1, lambda: next(steps), threading.get_ident)  # type: ignore[arg-type]
    reporter.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
    reporter.stop()
    reporter.stop()
    assert reporter._store is None
    assert list(reporter._tally.counts.values()) == [20]
