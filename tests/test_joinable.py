"""What the kit says of torch's own joins, of what is none, and the oracle of section 17."""

from collections.abc import Callable, Iterator

import pytest
import torch

from conformance.errors import TargetError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.oracles import join as oracle
from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.rules import book
from conformance.rules import section_17_joins as section
from conformance.scenarios.gradients import gradient
from conformance.scenarios.joinable import DDP, JOINABLES, PLAIN, SCENARIOS, SUBGROUPS, lengths
from conformance.session.engine import Engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import parse_claims
from conformance.subjects.spec import parse_other
from tests.cases import Case, Judgements
from tests.made_runs import event

TORCHS = Case("torch.distributed.algorithms.join:Join", worlds=(1, 2, 3), kind="joinable")


@pytest.mark.parametrize("case", [TORCHS], ids=str)
def test_torchs_context(judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case) -> None:
    judgements = judgements_of(case)
    refused = {number: judgement for number, judgement in judgements.items() if not judgement.verdict.holds}
    assert [number for number in refused if rules[number].level == MUST] == ["17.15"], refused
    said = {number: judgement.failures[0].actual for number, judgement in refused.items()}
    assert said == {
        "17.15": "rank 0: warnings filters changed",
        "17.16": "rank 0, a step of two counters after a context: 3",
        "17.17": "rank 1, context 0 with inputs (3, 2): joinable 0 is enabled and first in its main hook",
    }
    outside = [failure.actual for failure in refused["17.16"].failures]
    assert "rank 0, a step of DistributedDataParallel after an exception in one: 5" in outside
    assert not any("enable=False" in actual for actual in outside)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("tests.nowhere:Join", "there is no module 'tests.nowhere' on the path"),
        ("hooks_ref:Joinn", "no attribute 'Joinn'; did you mean Join"),
        ("hooks_ref:topk", "no attribute"),
        ("hooks_ref:QSGD", "a join context has notify_join_context, a joinable has join_hook; QSGD has neither"),
        ("torch.nn.parallel:DistributedDataParallel", "calling DistributedDataParallel failed: "),
        ("hooks_ref:Join,enable=False", "enable: the scenarios choose it; leave it out of the target"),
    ],
)
def test_what_is_no_subject_is_said_in_a_line(pool: Pool, target: str, line: str) -> None:
    engine = Engine(
        LocalSource(pool), book("joinable"), parse_other("joinable", target), parse_claims("min_world_size(2)", "joinable"), (2,)
    )
    with pytest.raises(TargetError, match=r"^[^\n]*$") as raised:
        engine.judge("17.1")
    assert line in str(raised.value)


def test_it_claims_nothing() -> None:
    with pytest.raises(UsageError, match=r"'local' is no claim of a subject of this kind \(joinable\); known: min_world_size"):
        parse_claims("local", "joinable")


def test_lengths_are_as_the_scenarios_say() -> None:
    for scenario in SCENARIOS:
        for size in (2, 3, 4):
            group = scenario.groups[0] if scenario.groups else tuple(range(size))
            planned = lengths(scenario, group)
            uneven = scenario.variant not in ("even", "disabled", "keywords", "raises", "wrong", "outside")
            assert any(len(set(inputs)) > 1 for inputs in planned) == uneven, scenario.name
            assert (
                not uneven
                or scenario.groups
                or any(0 in inputs and max(inputs) for inputs in planned)
                or scenario.variant in ("again", "throws_ddp")
            )
    first, second = (lengths(SUBGROUPS, group) for group in SUBGROUPS.groups)
    assert all(sum(one) < sum(other) for one, other in zip(first, second, strict=True)), "or WORLD would do for both"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_operations_is_within_its_bound(size: int) -> None:
    """And exactly the same where none of them rounds."""
    run = Run(DDP, size, [])
    for number, inputs in enumerate(lengths(DDP, tuple(range(size)))):
        at = oracle.At(_nobody(0), number, inputs, tuple(range(size)))
        for step in range(at.most):
            for by_all in (True, False):
                right, bound = oracle._gradient(run, at, step, 0, by_all)
                for got in _means(size, at.trains(step), step, size if by_all else len(at.trains(step))):
                    assert float((got.double() - right).abs().max()) <= bound


def _means(size: int, ranks: list[int], step: int, divisor: int) -> Iterator[torch.Tensor]:
    fed = [gradient("crafted", (15,), torch.float32, world=size, rank=rank, step=step, param=0) for rank in ranks]
    yield torch.stack(fed).sum(0) / divisor
    yield torch.stack([values * (1 / torch.tensor(float(divisor))) for values in fed]).sum(0)
    yield torch.stack([values / divisor for values in fed[::-1]]).sum(0)


def _nobody(rank: int) -> RankRecord:
    return RankRecord(rank, exit=0)


def made(sums: Callable[[int, int], list[int]]) -> Run:
    """Return a run of three contexts in which every joinable's collective summed what is given."""
    run = Run(PLAIN, 2, [_nobody(rank) for rank in range(2)])
    for record in run.ranks:
        record.events.append(event("subject", -1, is_context=True))
        for number, inputs in enumerate(lengths(PLAIN, (0, 1))):
            record.events.append(event("step", number))
            for at in range(inputs[0]):
                record.events += [event("summed", number, joinable=i, sums=sums(i, at)) for i in range(JOINABLES)]
    return run


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (lambda i, at: [3 * (slot == i) for slot in range(2 * JOINABLES)], ""),
        (
            lambda i, at: [3 * (slot == i) - 2 * (slot == i == 1) for slot in range(2 * JOINABLES)],
            "rank 0, context 0 with inputs (2, 2), step 0: joinable 1 stepped by ranks [0]",
        ),
        (
            lambda i, at: [(slot == i) + 2 * (slot == i + JOINABLES) for slot in range(2 * JOINABLES)],
            "rank 0, context 0 with inputs (2, 2), step 0: joinable 0 stepped by ranks [0], joinable 0 shadowed by ranks [1]",
        ),
    ],
    ids=["right", "a rank left out", "shadowed"],
)
def test_what_a_collective_sums_is_said(sums: Callable[[int, int], list[int]], said: str) -> None:
    found = Found()
    section.even.check(made(sums), parse_claims("min_world_size(2)", "joinable"), found)
    assert [failure.actual for failure in found.failures][:1] == ([said] if said else [])


def test_a_run_whose_ranks_do_not_say_what_they_ran_is_never_a_pass() -> None:
    run = made(lambda i, at: [3 * (slot == i) for slot in range(2 * JOINABLES)])
    run.ranks[1].events.pop(0)
    with pytest.raises(ValueError, match="ranks do not say what the subject is"):
        section.even.check(run, parse_claims("min_world_size(2)", "joinable"), Found())
