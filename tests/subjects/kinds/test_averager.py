"""Judging averagers: schedules, torch's own, and targets and claims that are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.errors import TargetError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.oracles.averager import due
from conformance.judging.rule import MUST, Rule
from conformance.scenarios.averager import PLAIN, UNUSED
from conformance.scenarios.averager_values import has_gradient
from conformance.session.options import Options
from conformance.session.request import named_subject
from conformance.session.session import Session
from conformance.subjects.claims import default_claims, parse_claims
from conformance.subjects.kinds import KINDS
from tests.cases import Case, Judgements, by_short_rules, own_judge
from tests.made_runs import made_run

TORCHS = "torch.distributed.algorithms.model_averaging"


def refused(rules: dict[str, Rule], judgements: Judgements) -> dict[str, str]:
    """Return the MUST rules that do not hold, each with its first cause or observation."""
    reasons = {}
    for judgement in judgements.values():
        if judgement.verdict.holds or rules[judgement.number].level != MUST:
            continue
        reasons[judgement.number] = judgement.reason
        if judgement.failures:
            first = judgement.failures[0]
            reasons[judgement.number] = first.cause or first.actual
    return reasons


REFUSING = {"14.5", "14.8"}
PERIODIC, HIERARCHICAL = (
    by_short_rules(Case(f"{TORCHS}.{target}", worlds=(2, 4), kind="averager"), REFUSING)
    for target in (
        "averagers:PeriodicModelAverager,period=4,warmup_steps=10",
        "hierarchical_model_averager:HierarchicalModelAverager,period_group_size_dict={2: 2, 4: 4}",
    )
)


@pytest.mark.parametrize(
    "case", [PERIODIC, pytest.param(HIERARCHICAL, marks=pytest.mark.rarely)], ids=str
)
def test_torchs_own_are_refused_by_these_rules_alone(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    """Each rank leaves out its own parameters without a gradient, and strides change."""
    wrong = refused(rules, judgements_of(case))
    assert wrong.keys() == REFUSING
    assert "ranks disagree in collective" in wrong["14.5"]
    assert wrong["14.8"].endswith("strides of p3, p4 changed")


@pytest.mark.parametrize(
    "target",
    [
        f"{TORCHS}.hierarchical_model_averager:HierarchicalModelAverager",
        "hooks_ref:HierarchicalModelAverager",
    ],
)
@pytest.mark.ranks
def test_a_missing_claim_of_the_smallest_group_is_named(
    rules: dict[str, Rule], target: str
) -> None:
    claims = "hierarchical(period_group_size_dict={2: 2, 4: 4}, warmup_steps=0)"
    case = Case(
        f"{target},period_group_size_dict={{2: 2, 4: 4}}",
        claims,
        worlds=(2,),
        kind="averager",
        rules=("14.1",),
        partly=True,
    )
    assert refused(rules, own_judge().judge(case)) == {
        "14.1": "the claims name groups of 4 ranks, and a group of 2 has no such group: if the "
        "averager is for 4 ranks and more, add min_world_size(4) to --claims"
    }


@pytest.mark.parametrize(
    ("claims", "size", "claim"),
    [
        ("hierarchical(period_group_size_dict={3: 2, 6: 3})", 2, "min_world_size(3)"),
        ("hierarchical(period_group_size_dict={3: 2, 6: 3})", 3, ""),
        (
            "like(HierarchicalModelAverager, period_group_size_dict={2: 2, 4: 4})",
            1,
            "min_world_size(4)",
        ),
        ("periodic(period=4)", 1, ""),
        ("like(EMAModelAverager, decay=0.5)", 1, ""),
    ],
)
def test_groups_that_claims_name_need_ranks(claims: str, size: int, claim: str) -> None:
    advice = KINDS["averager"].missing_claim(parse_claims(claims, "averager").options, size)
    assert claim in advice
    assert bool(advice) is bool(claim)


@pytest.mark.parametrize(
    ("period", "warmup"),
    [
        (1, 0),
        (100, 0),
        (4, 29),
    ],
)
@pytest.mark.rarely
@pytest.mark.ranks
def test_any_schedule(rules: dict[str, Rule], period: int, warmup: int) -> None:
    """It may average in every step, in the first one only, or in the last one only."""
    target = f"hooks_ref:PeriodicModelAverager,period={period},warmup_steps={warmup}"
    case = by_short_rules(Case(target, worlds=(2,), kind="averager"))
    assert set(refused(rules, own_judge().judge(case))) <= {"14.13"}


def test_steps_that_are_due() -> None:
    run = made_run(scenario=PLAIN, world=4)
    text = "hierarchical(period_group_size_dict={2: 2, 4: 4}, warmup_steps=3)"
    hierarchical = parse_claims(text, "averager")
    groups = [due(run, 3, step, hierarchical) for step in range(9)]
    assert groups == [(), (), (), (), (0, 1, 2, 3), (), (2, 3), (), (0, 1, 2, 3)]
    periodic = parse_claims("periodic(period=4, warmup_steps=10)", "averager")
    assert due(run, 0, 10, periodic) == (0, 1, 2, 3)
    assert due(run, 0, 9, parse_claims("periodic(period=3)", "averager")) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"period": 4}, "periodic(period=4, warmup_steps=0)"),
        (
            {"period_group_size_dict": {2: 2, 4: 4}},
            "hierarchical(period_group_size_dict={2: 2, 4: 4}, warmup_steps=0), min_world_size(4)",
        ),
    ],
)
def test_claims_follow_from_arguments(arguments: dict[str, object], text: str) -> None:
    claims = default_claims("averager", arguments)
    assert str(claims) == text
    assert parse_claims(text, "averager") == claims


def test_no_arguments_need_claims() -> None:
    with pytest.raises(
        UsageError, match=r"--averager: no claims follow from its arguments; type e\.g\. --claims"
    ):
        default_claims("averager", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exact", "is not a claim of an averager"),
        ("periodic", "periodic takes period="),
        ("periodic(period=0)", "whole number from 1"),
        ("periodic(period=4), periodic(period=5)", "given twice"),
        ("hierarchical(period_group_size_dict=4)", "group sizes by period"),
        ("like", "like takes a reference of hooks_ref, .*; one of PeriodicModelAverager"),
        ("like(NoSuchAverager)", "got NoSuchAverager"),
    ],
)
def test_claims_that_do_not_parse(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_claims(text, "averager")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nopkg:thing,period=4", "no module 'nopkg'"),
        ("hooks_ref:PeriodicModelAveragr,period=4", "did you mean PeriodicModelAverager"),
        ("hooks_ref:PeriodicModelAverager,period=4,perod=5", "unexpected keyword argument 'perod'"),
        ("hooks_ref:TopK,period=4", "unexpected keyword argument 'period'"),
        ("tests.subjects.kinds.test_averager:NoAverager,period=4", "NoAverager has none"),
    ],
)
def test_other_targets_are_refused_in_one_line(
    pool: Pool, tmp_path: Path, target: str, message: str
) -> None:
    certificate = str(tmp_path / "certificate.json")
    options = Options(averager=target, world_size="2", certificate=certificate)
    # The session is not closed: it would close the pool, which all tests share.
    session = Session.of(options, pool)

    def judge() -> None:
        session.begin()
        session.judge("14.1")

    with pytest.raises(TargetError, match=message):
        judge()


class NoAverager:
    def __init__(self, period: int) -> None: ...


def test_one_subject_at_a_time() -> None:
    averager = "hooks_ref:PeriodicModelAverager,period=4"
    options = Options(hook="hooks_ref:allreduce_hook", averager=averager)
    with pytest.raises(UsageError, match="--hook, --averager do not go together"):
        named_subject(options)


def test_gradients_are_missing_on_some_ranks_and_on_all() -> None:
    on_ranks = {
        tuple(has_gradient(UNUSED, 2, place, step, index) for place in (0, 1))
        for step in range(10, 30, 4)
        for index in range(len(UNUSED.params))
    }
    assert on_ranks == {(True, True), (True, False), (False, True), (False, False)}
