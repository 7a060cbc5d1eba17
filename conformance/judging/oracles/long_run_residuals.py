"""Judge compression with feedback over a long run; ``long_runs.py`` has the derivations."""

from dataclasses import replace

from conformance.judging.oracles import long_run_leaks, long_run_silence, long_runs
from conformance.judging.oracles.long_runs import LongRecord
from conformance.judging.verdict import Found
from conformance.scenarios.learning_rates import learning_rates


def require_delivered(record: LongRecord, found: Found) -> None:
    """Require what is held back to come out later, and a part of each bucket in each step."""
    judged = record
    findings = _sums(record)
    long_run = record.run.scenario.long_run
    knows_rates = bool(learning_rates(record.run.scenario)) and long_run.steps_per_round == 1
    if findings.failures and knows_rates:
        updates = replace(record, in_updates=True)
        of_updates = _sums(updates)
        if not of_updates.failures:
            judged = updates
            findings = of_updates
    found.checked(findings.checks, findings.margin)
    found.failures += findings.failures
    if not findings.failures:
        long_run_silence.require_something_of_each_step(judged, found)


def _sums(record: LongRecord) -> Found:
    """Judge the sums of results, in the units of a record."""
    found = Found()
    if long_runs.require_lossy(record, found):
        long_run_leaks.require_all_delivered(record, found)
    return found
