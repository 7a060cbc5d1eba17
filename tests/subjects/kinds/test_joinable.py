"""Judging joins: the oracle, torch's own context, and targets and claims that are refused."""

from collections.abc import Callable, Iterator

import pytest
import torch

from conformance.errors import TargetError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.oracles.join import Member, right_gradient
from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Found
from conformance.records.rank_record import IncompleteRecord, RankRecord
from conformance.records.run import Run
from conformance.rules import book
from conformance.rules import section_17_joins as section
from conformance.scenarios.gradients import gradient
from conformance.scenarios.joinable import DDP, PLAIN, SCENARIOS, SUBGROUPS, joinables_of, lengths
from conformance.session.engine import Engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import parse_claims
from conformance.subjects.spec import parse_other
from tests.cases import Case, Judgements, by_short_rules
from tests.made_runs import event

EVEN_VARIANTS = ("even", "disabled", "keywords", "raises", "wrong", "outside")
JOINABLES = joinables_of(PLAIN)
TORCHS = by_short_rules(
    Case("torch.distributed.algorithms.join:Join", worlds=(1, 2, 3), kind="joinable"),
    ("17.15", "17.16", "17.17"),
)


@pytest.mark.parametrize("case", [TORCHS], ids=str)
def test_torchs_context(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    refused = {number: j for number, j in judgements_of(case).items() if not j.verdict.holds}
    assert [number for number in refused if rules[number].level == MUST] == ["17.15"], refused
    assert {number: j.failures[0].actual for number, j in refused.items()} == {
        "17.15": "rank 0: warnings filters changed; added: once",
        "17.16": "rank 0, a step of two counters after a context: 3",
        "17.17": (
            "rank 1, context 0 with inputs (3, 2): joinable 0 is enabled and first in its main hook"
        ),
    }
    outside = [failure.actual for failure in refused["17.16"].failures]
    assert "rank 0, a step of DistributedDataParallel after an exception in one: 7" in outside
    assert not any("enable=False" in actual for actual in outside)


@pytest.mark.parametrize(
    "case",
    [Case("hooks_ref:Join", worlds=(2,), kind="joinable", rules=("17.15", "17.31"), partly=True)],
    ids=str,
)
def test_numbers_that_a_body_draws_are_no_trace_of_its_context(
    judgements_of: Callable[[Case], Judgements], case: Case
) -> None:
    """17.15 watches the runs of 17.31 too, in which the body of each context draws numbers."""
    judgements = judgements_of(case)
    assert {n: judgements[n].reason for n in case.rules if not judgements[n].verdict.holds} == {}
    assert any(run.startswith("joinable_modes@") for run in judgements["17.15"].runs)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("tests.nowhere:Join", "there is no module 'tests.nowhere' on the path"),
        ("hooks_ref:Joinn", "no attribute 'Joinn'; did you mean Join"),
        ("hooks_ref:topk", "no attribute"),
        (
            "hooks_ref:QSGD",
            "a join context has notify_join_context, a joinable has join_hook; QSGD has neither",
        ),
        ("torch.nn.parallel:DistributedDataParallel", "DistributedDataParallel requires module: "),
        (
            "hooks_ref:Join,enable=False",
            "enable: the scenarios choose it; leave it out of the target",
        ),
    ],
)
def test_other_targets_are_refused_in_one_line(pool: Pool, target: str, line: str) -> None:
    spec = parse_other("joinable", target)
    claims = parse_claims("min_world_size(2)", "joinable")
    engine = Engine(LocalSource(pool), book("joinable"), spec, claims, (2,))
    with pytest.raises(TargetError, match=r"^[^\n]*$") as raised:
        engine.judge("17.1")
    assert line in str(raised.value)


def test_it_claims_nothing() -> None:
    text = r"'local' is not a claim of a joinable; known: min_world_size"
    with pytest.raises(UsageError, match=text):
        parse_claims("local", "joinable")


def test_lengths_are_as_the_scenarios_say() -> None:
    for scenario in SCENARIOS:
        for size in (2, 3, 4):
            group = scenario.groups[0] if scenario.groups else tuple(range(size))
            planned = lengths(scenario, group)
            is_uneven = scenario.variant not in EVEN_VARIANTS
            assert any(len(set(inputs)) > 1 for inputs in planned) == is_uneven, scenario.name
            has_empty_rank = any(0 in inputs and max(inputs) for inputs in planned)
            may_have_none = scenario.groups or scenario.variant in ("again", "throws_ddp")
            assert not is_uneven or has_empty_rank or may_have_none
    # If both groups had equally many inputs, collectives on WORLD would pass for both.
    first, second = (lengths(SUBGROUPS, group) for group in SUBGROUPS.groups)
    assert all(sum(one) < sum(other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_operations_is_within_its_bound(size: int) -> None:
    """The bound is 0 if no operation rounds."""
    run = Run(DDP, size, [])
    group = tuple(range(size))
    for context, inputs in enumerate(lengths(DDP, group)):
        member = Member(_empty_record(0), context, inputs, group)
        for step in range(member.most_inputs):
            training = member.training(step)
            for by_all in (True, False):
                divisor = size if by_all else len(training)
                right, bound = right_gradient(run, member, step, 0, by_all)
                for got in _means(size, training, step, divisor):
                    assert float((got.double() - right).abs().max()) <= bound


def _means(size: int, ranks: list[int], step: int, divisor: int) -> Iterator[torch.Tensor]:
    fed = [
        gradient("crafted", (15,), torch.float32, world=size, rank=rank, step=step, param=0)
        for rank in ranks
    ]
    yield torch.stack(fed).sum(0) / divisor
    yield torch.stack([values * (1 / torch.tensor(float(divisor))) for values in fed]).sum(0)
    yield torch.stack([values / divisor for values in fed[::-1]]).sum(0)


def _empty_record(rank: int) -> RankRecord:
    return RankRecord(rank, exit=0)


def run_of_sums(sums: Callable[[int], list[int]]) -> Run:
    """Return a run of three contexts, with these sums in the collectives of each joinable."""
    run = Run(PLAIN, 2, [_empty_record(rank) for rank in range(2)])
    for record in run.ranks:
        record.events.append(event("subject", -1, is_context=True))
        for number, inputs in enumerate(lengths(PLAIN, (0, 1))):
            record.events.append(event("step", number))
            for _ in range(inputs[0]):
                record.events += [
                    event("summed", number, joinable=joinable, sums=sums(joinable))
                    for joinable in range(JOINABLES)
                ]
    return run


def all_stepped(joinable: int) -> list[int]:
    """Return the sums if both ranks step a joinable."""
    sums = [0] * (2 * JOINABLES)
    sums[joinable] = 0b11
    return sums


def first_rank_stepped_joinable_1(joinable: int) -> list[int]:
    sums = all_stepped(joinable)
    if joinable == 1:
        sums[1] = 0b01
    return sums


def second_rank_shadowed(joinable: int) -> list[int]:
    sums = [0] * (2 * JOINABLES)
    sums[joinable] = 0b01
    sums[JOINABLES + joinable] = 0b10
    return sums


FIRST_STEP = "rank 0, context 0 with inputs (2, 2), step 0: "


@pytest.mark.parametrize(
    ("sums", "actual"),
    [
        (all_stepped, None),
        (first_rank_stepped_joinable_1, f"{FIRST_STEP}joinable 1 stepped by ranks [0]"),
        (
            second_rank_shadowed,
            f"{FIRST_STEP}joinable 0 stepped by ranks [0], joinable 0 shadowed by ranks [1]",
        ),
    ],
)
def test_sums_show_the_roles_of_ranks(sums: Callable[[int], list[int]], actual: str | None) -> None:
    found = Found()
    section.even.check(run_of_sums(sums), parse_claims("min_world_size(2)", "joinable"), found)
    assert [failure.actual for failure in found.failures][:1] == ([actual] if actual else [])


def test_a_run_without_a_record_of_the_subject_never_passes() -> None:
    run = run_of_sums(all_stepped)
    run.ranks[1].events.pop(0)
    with pytest.raises(IncompleteRecord, match="'subject' on record: rank 1 has recorded none"):
        section.even.check(run, parse_claims("min_world_size(2)", "joinable"), Found())


def test_ranks_that_disagree_on_the_kind_of_the_subject_never_pass() -> None:
    run = run_of_sums(all_stepped)
    run.ranks[1].events[0]["is_context"] = not run.ranks[0].events[0]["is_context"]
    with pytest.raises(IncompleteRecord, match=r"a context on ranks \[.\] alone, and a joinable"):
        section.even.check(run, parse_claims("min_world_size(2)", "joinable"), Found())
