"""One rule on the records of one run, or of several."""

import traceback

from conformance.judging.misshapen import field_without_value, misshapen
from conformance.judging.rule import Rule
from conformance.judging.verdict import Found
from conformance.records.rank_record import IncompleteRecord
from conformance.records.run import Run
from conformance.subjects.claims import Claims


class RuleCrashed(Exception):
    """A rule raised an exception of its own, a defect of the kit; the text is its traceback."""


def apply_rule(rule: Rule, records: Run | dict[str, Run], claims: Claims) -> Found:
    """Return the findings of a rule.

    A record may lack a part that the rule reads, hold None for a value, or hold a tensor of another
    shape: the subject has kept the kit from recording, or has changed its parameters. That is a
    failure. If the reference fails in the same way, the engine makes a kit error of it.

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
