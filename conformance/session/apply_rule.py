"""One rule on the records of one run, or of several, and its findings as part of a judgement."""

import traceback

from conformance.judging.misshapen import field_without_value, misshapen
from conformance.judging.rule import Rule
from conformance.judging.verdict import Found, Judgement, Verdict
from conformance.records.rank_record import IncompleteRecord
from conformance.records.run import Run
from conformance.subjects.claims import Claims


class RuleCrashed(Exception):
    """A rule raised an exception of its own, a defect of the kit; the text is its traceback."""


def apply_rule(rule: Rule, records: Run | dict[str, Run], claims: Claims) -> Found:
    """Return the findings of a rule.

    A record may lack a part that the rule reads, hold None for a value, or hold a tensor of another
    shape: the subject has kept the kit from recording, or has changed its parameters. That is a
    failure. If the reference fails in the same way, the engine takes it for a kit error.

    Raises:
        RuleCrashed: the rule raised any other exception.
    """
    found = Found()
    try:
        rule.check(records, claims, found)
    except IncompleteRecord as error:
        found.require(False, error.expected, error.actual)
    except Exception:
        runs = list(records.values()) if isinstance(records, dict) else [records]
        wrong = misshapen(runs) or field_without_value(runs)
        if wrong is None:
            raise RuleCrashed(traceback.format_exc()) from None
        found.require(False, *wrong)
    return found


def note_findings(
    judgement: Judgement, name: str, rule: Rule, records: Run | dict[str, Run], claims: Claims
) -> None:
    """Apply a rule to records, and enter its findings into a judgement.

    An exception of the rule is the kit's error, never a verdict on the subject.

    Args:
        judgement: the judgement on the rule so far.
        name: the name of the run, or the names of the runs.
        rule: the rule.
        records: what the rule reads.
        claims: the claims of the subject.
    """
    try:
        found = apply_rule(rule, records, claims)
    except RuleCrashed as error:
        reason = f"the rule itself failed, a defect of the kit; please report it:\n{error}"
        judgement.note_run(name, Verdict.KIT_ERROR, reason)
        return
    verdict = found.verdict()
    if rule.watches and verdict is Verdict.NOT_RUN:
        return  # such a run has no such records; others have
    reason = found.failures[0].actual if found.failures else found.not_applicable or ""
    if verdict is Verdict.FAIL and not judgement.failures:
        judgement.failures = found.failures
    if verdict is Verdict.NOT_RUN:
        reason = found.without_evidence or "nothing in the records to judge it on"
    figures = {
        "checks": found.checks,
        "margin": found.margin,
        "traffic": found.traffic,
        "notes": found.notes or None,
    }
    judgement.note_run(name, verdict, reason, **figures)
