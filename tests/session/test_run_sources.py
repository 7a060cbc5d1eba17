"""Runs of a pool on a device: which are tried again, and which go on alone."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.records.files import KIT_FAILED, RAISED
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.hook import COLLECTIVE_RAISES, VALUES
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import requested_profile
from conformance.session import run_sources
from conformance.session.run_sources import TRIES, LocalSource
from conformance.subjects.spec import SubjectSpec
from tests.made_runs import event

ON_A_DEVICE = requested_profile("nccl", "cuda")


class MadePool:
    """Makes folders in place of runs. While a run goes on, ``during`` is called with its name."""

    capacity = None
    lanes = 3

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.lock = threading.Lock()

    def during(self, name: str) -> None:
        """Do nothing."""

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Path:
        with self.lock:
            self.asked.append(name)
            folder = self.folder / f"{len(self.asked)}"
        folder.mkdir()
        self.during(name)
        return folder


def busy(stopped: str = "ended") -> Run:
    """Return a run in which no rank could start its device."""
    error = event("error", -1, where="kit", type="AcceleratorError", message="busy", traceback="")
    run = Run(VALUES, 1, [RankRecord(0, [error], exit=RAISED)])
    run.stopped = stopped
    return run


def silent() -> Run:
    """Return a run in which the process above the ranks fell silent."""
    return Run(VALUES, 1, [], "silent", host="it did not answer")


def well() -> Run:
    return Run(VALUES, 1, [RankRecord(0, [event("finished", 0)], exit=0)])


@pytest.mark.parametrize(
    ("runs", "tries"),
    [
        ([well()], 1),
        ([busy(), well()], 2),
        ([busy()] * TRIES, TRIES),
        ([silent(), well()], 2),
        ([silent()] * TRIES, TRIES),
        # It has taken its whole deadline.
        ([busy("hang")], 1),
        # The subject's own errors are its own.
        ([Run(VALUES, 1, [RankRecord(0, [event("call", 0)], exit=RAISED)])], 1),
        ([Run(VALUES, 1, [RankRecord(0, exit=KIT_FAILED)])], 1),
    ],
)
def test_a_run_that_a_busy_machine_may_have_ended_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[Run], tries: int
) -> None:
    left = iter(runs)
    monkeypatch.setattr(run_sources, "load_run", lambda *_: next(left))
    pool = MadePool(tmp_path)
    source = LocalSource(pool)
    assert source.run(VALUES, 1, None, "values@1") is runs[-1]
    assert pool.asked == ["values@1"] * tries
    assert not any(tmp_path.iterdir())


def test_on_a_device_a_planned_failure_goes_on_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on beside each other, before it and after it."""
    monkeypatch.setattr(run_sources, "load_run", lambda *_: well())
    first, last = threading.Barrier(3, timeout=60), threading.Barrier(2, timeout=60)
    begun = threading.Event()
    meetings = {"a": first, "b": first, "c": last, "d": last}
    going_on: set[str] = set()
    seen: list[set[str]] = []

    class Watched(MadePool):
        def during(self, name: str) -> None:
            name = name.partition("@")[0]
            with self.lock:
                going_on.add(name)
                seen.append(set(going_on))
            if name in meetings:
                meetings[name].wait()
                assert begun.wait(60)
            with self.lock:
                seen.append(set(going_on))
                going_on.discard(name)

    def named(name: str) -> tuple[Scenario, int]:
        scenario = COLLECTIVE_RAISES if name == "fails" else VALUES
        return replace(scenario, name=name, profile=ON_A_DEVICE), 2

    source = LocalSource(Watched(tmp_path))
    source.begin([named("a"), named("b")], None)
    first.wait()  # a and b go on
    source.begin([named(name) for name in ("fails", "c", "d")], None)
    begun.set()
    for name in ("a", "b", "fails", "c", "d"):
        source.run(*named(name), None, f"{name}@2")
    assert [names for names in seen if "fails" in names] == [{"fails"}] * 2
    assert {"a", "b"} in seen
    assert {"c", "d"} in seen
