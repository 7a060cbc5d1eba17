"""The responsibility for a failed run: one rule fails, and the other rules are not run.

A failed run fails the rule that its kind of failure belongs to (``Rule.blamed_for``: a refused
registration belongs to 1.1, a result that is no future to 1.2), or else the rule that owns the
scenario. For every other rule that reads the run it is "not run". A run that claims exclude, such
as a dtype that the subject refuses, fails nobody if every rank got an error.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from conformance.judging.rule import Rule, WorldSizes
from conformance.judging.run_failures import FailedRun, fault_of_torch, refused_on_every_rank
from conformance.judging.verdict import Verdict
from conformance.records.run import Run
from conformance.scenarios.hook import FROZEN
from conformance.subjects.claims import Claims
from conformance.subjects.kinds import KINDS
from conformance.subjects.spec import SubjectSpec

_CALL_ON_NONE = re.compile(r"raised (Attribute|Type)Error: .*NoneType.*\(in hook call ")


@dataclass(frozen=True)
class Consequence:
    """The meaning of a failed run for one rule.

    Attributes:
        verdict: FAIL if the rule is responsible.
        reason: one line.
        checks: the checks that the failed run answers: 1 for a refusal that was claimed.
    """

    verdict: Verdict
    reason: str
    checks: int | None = None


def consequence(
    rules: Mapping[str, Rule], rule: Rule, claims: Claims, run: Run, failed: FailedRun
) -> Consequence | None:
    """Return the meaning of a failed run for a rule; None to judge it on its other runs."""
    excluded = claims_exclude(claims, run)
    refuses = refused_on_every_rank(run)
    if failed.kind == "node":
        return Consequence(Verdict.NOT_RUN, failed.line)
    if failed.kind == "machine" and is_responsible(rules, rule, run, failed):
        return Consequence(Verdict.KIT_ERROR, failed.line)
    if fault := fault_of_torch(run):
        return Consequence(Verdict.NOT_APPLICABLE, fault, checks=1)
    if run.scenario.simulated:
        reason = f"it cannot be simulated: {failed.line}"
        return Consequence(Verdict.NOT_APPLICABLE, reason, checks=1)
    has_twins = bool(run.scenario.twin_groups) or run.scenario.joint
    if has_twins and any(rank.first("twin", one_object=True) for rank in run.ranks):
        reason = f"the subject is one object, which both models would share: {failed.line}"
        return Consequence(Verdict.NOT_APPLICABLE, reason, checks=1)
    if rule.worlds is WorldSizes.BELOW_MINIMUM and refuses:
        return Consequence(Verdict.PASS, failed.line, checks=1)
    if refuses_scenario(rule, run):
        return Consequence(Verdict.PASS, f"refused with an error on every rank: {failed.line}", 1)
    if excluded and refuses and len(rule.on) > 1 and not owns(rule, run):
        return None
    if (rule.may_refuse or excluded) and refuses:
        reason = f"refused with an error on every rank: {failed.line}"
        return Consequence(Verdict.NOT_APPLICABLE, reason, checks=1)
    if is_responsible(rules, rule, run, failed):
        return Consequence(Verdict.FAIL, failed.line)
    return Consequence(Verdict.NOT_RUN, f"{run.name} broke: {failed.line}")


def refuses_scenario(rule: Rule, run: Run) -> bool:
    """Whether a subject has refused, with an error on every rank, a scenario that the rule lets it
    refuse; the rule is judged on its other runs.

    Of frozen parameters a fused hook may refuse the new storage of parameters alone, which no
    parameter has in the first step.
    """
    refusable = {scenario.name for scenario in rule.refusable}
    if run.scenario.family not in refusable or not refused_on_every_rank(run):
        return False
    if run.scenario.family != FROZEN.name:
        return True
    errors = [rank.first("error") for rank in run.ranks]
    return run.scenario.fused and all(error and error["step"] > 0 for error in errors)


def is_responsible(rules: Mapping[str, Rule], rule: Rule, run: Run, failed: FailedRun) -> bool:
    """Whether a failed run fails this rule."""
    blamed = blamed_rule(rules, run, failed)
    if blamed is not None:
        return rule.number == blamed.number
    return owns(rule, run)


def blamed_rule(rules: Mapping[str, Rule], run: Run, failed: FailedRun) -> Rule | None:
    """Return the rule that this kind of failure belongs to, if it reads the run; else None."""
    for rule in rules.values():
        if rule.blamed_for != failed.kind or rule.kind != run.scenario.kind:
            continue
        if rule.watches or run.scenario.family in {scenario.name for scenario in rule.on}:
            return rule
    return None


def owns(rule: Rule, run: Run) -> bool:
    """Whether a rule owns the scenario of a run."""
    return run.scenario.family in {scenario.name for scenario in rule.owns}


def claims_exclude(claims: Claims, run: Run) -> bool:
    """Whether the claims exclude this run's group sizes or dtypes."""
    if any(len(group) < claims.min_world_size for group in run.scenario.groups):
        return True
    dtypes = {spec.dtype for spec in run.scenario.params}
    return bool(claims.dtypes) and not dtypes <= set(claims.dtypes)


def missing_state(subject: SubjectSpec, failed: FailedRun) -> str:
    """Return advice if a hook without ``--state`` raised in a call on an object that is None, ''
    otherwise.
    """
    if subject.hook is None or subject.state or not _CALL_ON_NONE.search(failed.line):
        return ""
    return (
        "without --state the hook gets None as its state; if it needs one, give --state "
        "mypkg:MyState,option=value"
    )


def missing_claim(claims: Claims, run: Run, failed: FailedRun) -> str:
    """Return the claim that would exclude a run that raised, as advice, or '' if there is none."""
    if failed.kind != "raised":
        return ""
    size = min(map(len, run.scenario.groups), default=run.world)
    return KINDS[run.scenario.kind].missing_claim(claims.options, size)
