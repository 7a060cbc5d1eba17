"""Sessions for tests of the reports, from made judgements: nothing is run."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from conformance.certificates.certificate import REQUIRED_WORLDS, Conclusion, conclude
from conformance.judging.verdict import Failure, Judgement, Verdict
from conformance.records.run import Run
from conformance.scenarios.hook import VALUES
from conformance.session.options import Options
from conformance.session.session import Session
from conformance.subjects.claims import parse_claims
from tests.made_certificates import header, judged

CLAIMS = parse_claims("rounded(float16)")

Made = Callable[..., Session]


def made_session(*judgements: Judgement) -> Session:
    """Return a session, in the current folder, from the judgements that are not a pass."""
    options = Options(hook="mypkg.hooks:half", claims="rounded(float16)")
    pool: Any = SimpleNamespace(interruptions=[])
    session = Session.of(options, pool, runs=False)
    session.header = header()
    session.judgements = {
        number: judged(session.rules[number], CLAIMS)
        for number in session.selected
        if number != "13.7"
    }
    session.judgements |= {judgement.number: judgement for judgement in judgements}
    return session


def with_runs(session: Session, runs: Sequence[Run], **explained: Run) -> Session:
    """Return a session that has made these runs.

    Args:
        session: the session.
        runs: the runs.
        explained: by the scenario of a failed run at world size 2, its repetition.
    """
    engine: Any = SimpleNamespace(
        runs=list(runs),
        subject=session.subject,
        claims=CLAIMS,
        plan=SimpleNamespace(plainest=VALUES, runs_of=lambda rule: []),
        maker=SimpleNamespace(
            explained={f"{name}@2": run for name, run in explained.items()},
            vanilla=lambda run: run,
            made={},
        ),
        would_hold=lambda claims, numbers: False,
    )
    session.engine = engine
    return session


def failed(number: str, actual: str = "2 on rank 0", **evidence: Any) -> Judgement:
    """Return the judgement on a rule that fails in one run."""
    failure = Failure("mean 1 within 3e-08", actual, "the sum, not the mean", evidence)
    runs = {"values@2": {"verdict": "fail", "reason": actual, "checks": 3}}
    return Judgement(number, Verdict.FAIL, f"values@2: {actual}", [failure, failure], runs)


def of_verdict(verdict: Verdict, numbers: Iterable[str], reason: str) -> list[Judgement]:
    """Return judgements with a verdict for a reason, each in a run of another world size."""
    return [
        Judgement(number, verdict, reason.format(run=f"values@{world + 1}"))
        for world, number in enumerate(numbers)
    ]


def conclusion_of(session: Session) -> Conclusion:
    """Return the conclusion of a session at all world sizes."""
    kind = session.subject.kind
    return conclude(session.rules, session.judgements, session.header, REQUIRED_WORLDS, kind)
