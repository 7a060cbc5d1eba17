"""Growth in long runs of other kinds than hooks: counts that grow, and counts that do not."""

import random
from typing import Any

import pytest

from conformance.judging.oracles.kept import require_models_gone, require_nothing_kept
from conformance.judging.verdict import Found, Verdict
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.averager_training import LONG
from tests.made_runs import event

STEPS = 400
PLACES = [place * (STEPS - 1) // 40 for place in range(41)]


def judged(**counts: Any) -> Verdict:
    """Return the verdict on a run with functions of the step as counts."""
    names = ("tensors", "bytes", "nodes", "objects", "entries", "files", "memory")
    record = RankRecord(0, exit=0)
    for step in PLACES:
        values = {name: counts.get(name, lambda _: 5)(step) for name in names}
        record.events.append(event("kept", step, at=step, **values))
    found = Found()
    require_nothing_kept(Run(LONG, 1, [record]), found)
    return found.verdict()


@pytest.mark.parametrize("period", [1, 7, 13, 50, 57, 60, 66, 70, 97, 120])
@pytest.mark.parametrize("name", ["tensors", "objects", "entries", "files"])
def test_an_object_in_every_so_many_steps_is_growth(name: str, period: int) -> None:
    for phase in range(0, period, max(1, period // 5)):
        grows = lambda step, phase=phase: (step + phase) // period  # noqa: E731
        assert judged(**{name: grows}) is Verdict.FAIL


@pytest.mark.parametrize("begin", [150, 250, 375])
def test_growth_may_begin_late(begin: int) -> None:
    assert judged(entries=lambda step: max(0, step - begin)) is Verdict.FAIL


def of_models(alive: int, threads: int = 0) -> Found:
    """Return what is found if so many of eight models stay, and so many threads."""
    models = event("models", STEPS, made=8, alive=alive, threads=threads)
    found = Found()
    require_models_gone(Run(LONG, 1, [RankRecord(0, [models], exit=0)]), found)
    return found


def test_the_last_model_may_stay() -> None:
    assert of_models(0).verdict() is of_models(1).verdict() is Verdict.PASS
    assert of_models(2).verdict() is Verdict.FAIL
    assert of_models(8, threads=7).verdict() is Verdict.FAIL


def test_models_of_averagers_with_threads_may_stay() -> None:
    found = of_models(8, threads=8)
    assert not found.failures
    assert found.notes == ["each averager has a thread, which keeps its model in memory"]


def test_what_fills_or_comes_and_goes_is_no_growth() -> None:
    assert judged(tensors=lambda step: min(step, 100)) is Verdict.PASS
    assert judged(entries=lambda step: min(step, 256)) is Verdict.PASS
    assert judged(entries=lambda step: min(step, 256) + (step > 300)) is Verdict.PASS
    assert judged(entries=lambda step: step % 90) is Verdict.PASS
    assert judged(bytes=lambda step: 4096 * (step > 300)) is Verdict.PASS
    assert judged(memory=lambda step: 760 * step) is Verdict.PASS


@pytest.mark.parametrize("seed", range(50))
def test_objects_that_are_there_now_and_then_are_no_growth(seed: int) -> None:
    draw = random.Random(seed)
    values = {step: draw.choice((5, 5, 5, 5, 6, 7)) for step in PLACES}
    assert judged(objects=values.__getitem__) is Verdict.PASS


def test_memory_outside_of_python_grows() -> None:
    assert judged(memory=lambda step: 5000 * step) is Verdict.FAIL


def test_a_short_record_is_no_evidence() -> None:
    found = Found()
    require_nothing_kept(Run(LONG, 1, [RankRecord(0, exit=0)]), found)
    assert found.verdict() is Verdict.NOT_RUN
