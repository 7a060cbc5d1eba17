"""A collective that fails on one rank alone, and the verdicts on subjects of four kinds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.judging.oracles.averager import due
from conformance.judging.rule import Rule
from conformance.judging.verdict import Found, Verdict
from conformance.ranks.instruments.failing_collective import FailingCollective
from conformance.ranks.instruments.injected import Injected
from conformance.records.recorder import Recorder
from conformance.scenarios import failing_collectives as scenarios
from conformance.scenarios.draws import drawn
from conformance.scenarios.model import CALL_FAILS, FAULTY_RANK, WORK_FAILS, Fault, Scenario
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import default_claims, parse_claims
from tests.made_runs import event, made_run

Make = Callable[..., FailingCollective]

OWN_ERROR = {"raised": True, "type": "Injected", "message": "this collective failed", "chain": []}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that makes the instrument of one rank."""

    def made(rank: int = FAULTY_RANK, **fault: Any) -> FailingCollective:
        scenario = replace(scenarios.AVERAGER[0], fault=Fault(**fault))
        return FailingCollective(scenario, rank, Recorder(tmp_path))

    return made


class _Ended(dist.Work):
    """A collective that has ended well."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def test_the_drawn_collective_fails_and_no_other(make: Make) -> None:
    failing = make(kind=CALL_FAILS, step=1, succeeding=1, least_bytes=64)
    for step, size in ((0, 64), (1, 64), (1, 63)):
        failing.begin_step(step)
        assert failing.pass_on("allreduce_", size, "the work") == "the work"
    with pytest.raises(Injected):
        failing.pass_on("allreduce_", 64, "the work")
    assert failing.pass_on("allreduce_", 64, "the work") == "the work"


@pytest.mark.parametrize(("rank", "kind"), [(0, CALL_FAILS), (1, "none")])
def test_nothing_fails_on_another_rank_or_without_a_fault(make: Make, rank: int, kind: str) -> None:
    failing = make(rank, kind=kind, step=0)
    failing.begin_step(0)
    assert failing.pass_on("allreduce_", 64, "the work") == "the work"


@pytest.mark.parametrize("is_boxed", [True, False])
def test_a_failing_work_raises_in_wait_and_in_its_future(make: Make, is_boxed: bool) -> None:
    failing = make(kind=WORK_FAILS, step=0)
    failing.begin_step(0)
    ended = _Ended()
    given = ended.boxed() if is_boxed else ended
    tensors, result = failing.pass_on("allreduce_", 64, ("the tensors", given))
    assert tensors == "the tensors"
    work = dist.Work.unbox(result) if is_boxed else result
    for wait in (work.wait, work.synchronize, work.get_future().wait, work.get_future().value):
        with pytest.raises(RuntimeError, match="injected by the conformance kit"):
            wait()
    assert (work.is_completed(), work.is_success()) == (True, False)
    read = work.get_future().then(lambda future: future.value())
    with pytest.raises(RuntimeError, match="injected by the conformance kit"):
        read.wait()


def test_the_run_ends_with_the_step_of_the_failure(make: Make) -> None:
    failing = make(kind=CALL_FAILS, step=0)
    begun: list[int] = []

    def steps() -> None:
        for step in range(3):
            failing.begin_step(step)
            begun.append(step)
            with pytest.raises(Injected):
                failing.pass_on("allreduce_", 64, None)

    failing.run(steps)
    assert begun == [0]


def test_an_error_before_the_failure_is_the_subjects_own(make: Make) -> None:
    failing = make(kind=CALL_FAILS, step=3)

    def steps() -> None:
        failing.begin_step(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing.run(steps)


OF_KINDS = {
    "14.22": scenarios.AVERAGER,
    "15.30": scenarios.OPTIMIZER,
    "16.30": scenarios.STRATEGY,
    "18.26": scenarios.COLLECTIVE,
}


@pytest.mark.parametrize("number", OF_KINDS)
@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        ({"unused": False, **OWN_ERROR}, Verdict.PASS),
        ({"unused": False, "raised": False}, Verdict.FAIL),
        # An error by chance, of a result that was used.
        (
            {"unused": False, **OWN_ERROR, "type": "IndexError", "message": "out of range"},
            Verdict.FAIL,
        ),
        ({"unused": True, "raised": False}, Verdict.NOT_RUN),
        ({"unused": True, "raised": False, "started": 0}, Verdict.NOT_APPLICABLE),
    ],
)
def test_the_verdict(
    rules: dict[str, Rule], number: str, outcome: dict[str, Any], verdict: Verdict
) -> None:
    for scenario in OF_KINDS[number]:
        run = made_run(scenario=scenario)
        fault = {"fault": scenario.fault.kind, "started": 2, "collective": "allreduce", **outcome}
        run.ranks[scenario.fault.rank].events.append(event("fault", 3, **fault))
        found = Found()
        rules[number].check(run, parse_claims("exact"), found)
        assert found.verdict() is verdict


@pytest.mark.parametrize("scenario", scenarios.AVERAGER, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("period", [1, 4, 900])
def test_enough_averages_are_due_from_the_failure_on(scenario: Scenario, period: int) -> None:
    claims = default_claims("averager", {"period": period, "warmup_steps": 10})
    for seed in range(5):
        adapted = adapt_scenario(scenario, claims, seed=seed)
        run = made_run(scenario=replace(adapted, steps=adapted.steps[:1]))
        steps = range(adapted.fault.step, len(adapted.steps))
        averages = [step for step in steps if due(run, adapted.fault.rank, step, claims)]
        assert averages[0] == adapted.fault.step
        assert len(averages) > scenarios.MOST_SUCCEEDING
        assert adapted.fault.succeeding <= scenarios.MOST_SUCCEEDING


@pytest.mark.parametrize("number", OF_KINDS)
def test_steps_and_sizes_are_drawn_within_their_ranges(number: str) -> None:
    for seed in range(50):
        for scenario in OF_KINDS[number]:
            is_large = scenario.fault.kind == WORK_FAILS
            made = drawn(scenario, seed)
            assert 1 <= made.fault.step <= (11 if is_large else 47)
            for param in made.params if is_large else ():
                assert 2**12 <= torch.Size(param.shape).numel() < 2**19 + 64


@pytest.mark.parametrize("number", OF_KINDS)
def test_every_collective_of_three_fails_and_either_rank(number: str) -> None:
    for seed in range(10):
        faults = [drawn(scenario, seed).fault for scenario in OF_KINDS[number]]
        calls = [fault for fault in faults if fault.kind == CALL_FAILS]
        assert [fault.succeeding for fault in calls] == [0, 1, 2] * (len(calls) // 3)
        assert {fault.rank for fault in calls} == {0, 1}
        assert {fault.rank for fault in faults if fault.kind == WORK_FAILS} == {0, 1}
