"""The verdict of a rule is that of its runs."""

import pytest

from conformance.judging.verdict import Judgement, Verdict

PASS = Verdict.PASS
APART = Verdict.NOT_APPLICABLE
NOT_RUN = Verdict.NOT_RUN
FAIL = Verdict.FAIL


@pytest.mark.parametrize(
    ("of_runs", "verdict", "reason"),
    [
        ((PASS, PASS), PASS, ""),
        ((APART, APART), APART, "run 0: not applicable"),
        # Others were judged, whatever comes first.
        ((PASS, APART), PASS, ""),
        ((APART, PASS), PASS, ""),
        ((APART, PASS, NOT_RUN), NOT_RUN, "run 2: not run"),
        ((FAIL, PASS, APART), FAIL, "run 0: fail"),
    ],
)
def test_a_run_that_does_not_concern_the_rule_decides_if_it_is_alone(
    of_runs: tuple[Verdict, ...], verdict: Verdict, reason: str
) -> None:
    judgement = Judgement("1.1", Verdict.PASS)
    for number, one in enumerate(of_runs):
        judgement.note_run(f"run {number}", one, "" if one is PASS else str(one))
    assert (judgement.verdict, judgement.reason) == (verdict, reason)
