"""Rules that were not run follow from a rule that fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.judging.verdict import Judgement, Verdict
from conformance.session.consequences import consequences, left_out_causes
from tests.made_sessions import conclusion_of, failed, made_session


def not_run(number: str, reason: str) -> Judgement:
    return Judgement(number, Verdict.NOT_RUN, reason)


def test_each_rule_follows_from_the_first_cause() -> None:
    broken = {"values@2": {"verdict": "fail", "reason": ""}}
    judgements = [
        Judgement("1.5", Verdict.FAIL, "values@2: hung", runs=broken),
        not_run("1.1", "judged only if 1.5 holds"),
        not_run("2.1", "judged only if 1.1 holds"),
        not_run("2.2", "values@3: not tried: it hung in values@2"),
        not_run("2.3", "values@3: values@3: not tried: values@2 broke"),
        not_run("2.4", "values@3: 2.1 does not hold at world size 3"),
        Judgement("9.1", Verdict.FAIL, "a descriptor"),
        not_run("9.2", "judged only if 9.1 holds"),
        not_run("9.3", "no world size of this profile runs it"),
        Judgement("9.4", Verdict.PASS),
    ]
    assert consequences({one.number: one for one in judgements}) == {
        "1.5": ["1.1", "2.1", "2.2", "2.3", "2.4"],
        "9.1": ["9.2"],
    }


def test_rules_that_wait_for_each_other_follow_from_none() -> None:
    judgements = [
        not_run("1.1", "judged only if 1.2 holds"),
        not_run("1.2", "judged only if 1.1 holds"),
    ]
    assert consequences({one.number: one for one in judgements}) == {}


def causes(judgements: list[Judgement], *selected: str) -> dict[str, str]:
    blamed = {"1.5": "rank 0 raised RuntimeError [values@2]"}
    return left_out_causes({one.number: one for one in judgements}, selected, blamed)


def test_a_failed_rule_that_was_left_out_is_named() -> None:
    judgements = [
        Judgement("1.5", Verdict.FAIL, "values@2: hung"),
        not_run("2.1", "judged only if 1.5 holds"),
        not_run("4.2", "judged only if 2.1 holds"),
    ]
    assert causes(judgements, "4.2") == {"1.5": "values@2: hung"}
    assert causes(judgements, "1.5", "4.2") == {}


def test_so_is_one_that_a_broken_run_is_blamed_on() -> None:
    judgements = [
        not_run("1.1", "not tried: values@2 broke"),
        not_run("2.1", "judged only if 1.1 holds"),
    ]
    assert causes(judgements, "2.1") == {"1.5": "rank 0 raised RuntimeError [values@2]"}


def test_rules_that_were_run_need_no_cause() -> None:
    assert causes([Judgement("2.1", Verdict.PASS)], "2.1") == {}


@pytest.mark.parametrize(
    ("left_out", "counted", "verdict"),
    [
        (failed("2.1"), {"2.1", "8.1"}, "refused"),
        (not_run("2.1", "no rank came"), {"8.1"}, "not certified"),
    ],
    ids=["fails", "was not run"],
)
def test_a_rule_that_was_left_out_counts_if_it_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    left_out: Judgement,
    counted: set[str],
    verdict: str,
) -> None:
    """Exit code 7 would say that nothing failed."""
    monkeypatch.chdir(tmp_path)
    session = made_session()
    waits = not_run("8.1", "judged only if 2.1 holds")
    session.judgements = {"8.1": waits}
    engine: Any = SimpleNamespace(judgements={"8.1": waits, "2.1": left_out}, blamed=dict)
    session.engine = engine
    session.add_failed_prerequisites()
    assert set(session.judgements) == counted
    assert conclusion_of(session).verdict == verdict
