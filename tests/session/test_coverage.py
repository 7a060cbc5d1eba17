"""Coverage of a session: its entry, its lines, and --require-coverage."""

from typing import Any

import pytest

from conformance.certificates.certificate import conclude, coverage_line, uncovered_lines
from conformance.errors import CERTIFIED, NOT_CERTIFIED, REFUSED
from conformance.judging.rule import Rule, golden_list
from conformance.judging.verdict import Judgement, Verdict
from conformance.session.coverage import Measured, Tried, entry, measure
from tests.made_runs import made_run

WORLDS = (1, 2, 3, 4)
UNTAKEN = {"file": "pkg/a.py", "line": 3, "source": "if n > 5:", "side": "never true"}


def coverage(required: bool, *, untaken: bool = True, measured: bool = True) -> dict[str, Any]:
    if not measured:
        return entry(Measured(None, "no source"), Tried(), required=required)
    return {
        "measured": True,
        "required": required,
        "files": [{"file": "pkg/a.py"}],
        "untaken": [UNTAKEN] if untaken else [],
        "never_called": [],
        "probes": [],
        "out_of_reach": [],
    }


@pytest.mark.parametrize(
    ("given", "exit_code"),
    [
        (coverage(False), CERTIFIED),
        (coverage(True), REFUSED),
        (coverage(True, untaken=False), CERTIFIED),
        (coverage(False, measured=False), CERTIFIED),
        (coverage(True, measured=False), NOT_CERTIFIED),
        (coverage(True, untaken=False) | {"function_not_measured": "of torch"}, NOT_CERTIFIED),
    ],
)
def test_required_coverage_decides(
    rules: dict[str, Rule], given: dict[str, Any], exit_code: int
) -> None:
    judgements = {number: Judgement(number, Verdict.PASS) for number in golden_list()}
    conclusion = conclude(rules, judgements, {"coverage": given}, WORLDS)
    assert conclusion.exit_code == exit_code, conclusion.reasons
    if exit_code != CERTIFIED:
        assert conclusion.reasons[0].startswith("--require-coverage: ")


def test_lines() -> None:
    given = coverage(False)
    assert coverage_line(given) == (
        "no run reached 1 branch and 0 functions of the subject's own code (1 file)"
    )
    assert uncovered_lines(given) == ["pkg/a.py:3: if n > 5: (never true)"]
    assert coverage_line(coverage(False, untaken=False)) == (
        "every branch of the subject's own code (1 file) ran"
    )
    assert coverage_line(coverage(False, measured=False)) == "coverage was not measured: no source"
    assert coverage_line(given | {"function_not_measured": "it is torch's"}) == (
        "no run reached 1 branch and 0 functions of the subject's own code (1 file), but its "
        "function was not measured: it is torch's"
    )


def test_runs_without_marks_are_not_measured() -> None:
    measured = measure([made_run()])
    assert measured.coverage is None
    assert measured.reason == "no rank noted which lines ran"
