"""Tests of collectives over a backend that is written in Python, a subclass of ProcessGroup."""

import pytest

from conformance.hosts.pool import Pool
from conformance.judging.verdict import Judgement, Verdict
from conformance.session.options import Options
from conformance.session.session import Session

MODULE = "tests.python_backend"
RULES = ("1.8", "2.1", "10.2", "10.6", "10.7", "12.1")


def judged(pool: Pool, name: str, rules: tuple[str, ...] = RULES) -> dict[str, Judgement]:
    options = Options(
        hook=f"{MODULE}:{name}",
        backend="pythonic",
        backend_import=MODULE,
        world_size="2,3",
        rule=(",".join(rules),),
    )
    session = Session.of(options, pool)  # it is not closed: the pool is everybody's
    session.begin()
    return {number: session.judge(number) for number in rules}


def test_collectives_are_recorded(pool: Pool) -> None:
    judgements = judged(pool, "hook")
    reasons = {number: one.reason for number, one in judgements.items() if not one.verdict.holds}
    assert reasons == {}
    # Five buckets in four steps at three ranks, but one bucket in the first step, and two runs.
    assert judgements["10.2"].checks >= 2 * 3 * 16


def test_ranks_that_disagree_are_refused(pool: Pool) -> None:
    judgement = judged(pool, "disagrees", ("10.2",))["10.2"]
    assert judgement.verdict is Verdict.FAIL
    assert "allreduce MIN 1 float32" in judgement.failures[0].actual


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        ("10.2", "saw no collective"),
        pytest.param("10.7", "judged only if 10.2 holds", marks=pytest.mark.rarely),
        pytest.param("12.1", "saw no collective", marks=pytest.mark.rarely),
        pytest.param("12.5", "judged only if 12.1 holds", marks=pytest.mark.rarely),
    ],
)
def test_rules_without_evidence_are_not_run(pool: Pool, number: str, reason: str) -> None:
    """The hook exchanges gradients through the store, past all process groups."""
    require_not_run(pool, number, reason)


@pytest.mark.rarely
def test_a_rule_that_builds_on_one_without_evidence_is_not_run(impatient: Pool) -> None:
    """Ranks wait in the store for a peer that has died, until the deadline."""
    require_not_run(impatient, "12.4", "judged only if 12.2 holds")


def require_not_run(pool: Pool, number: str, reason: str) -> None:
    judgement = judged(pool, "through_the_store", (number,))[number]
    assert judgement.verdict is Verdict.NOT_RUN
    assert reason in judgement.reason
