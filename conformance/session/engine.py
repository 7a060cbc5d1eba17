"""From a subject to judgements: runs each scenario once, and applies the rules.

A failure is the subject's only if the reference of its kind passes the same rule on the same
machine: the control. If the reference fails too, the verdict is "kit error". ``plan.py`` decides
which runs a rule reads, and ``blame.py`` which rule a failed run fails.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.errors import KitError, TargetError, UsageError
from conformance.judging.collective_order import disagreement
from conformance.judging.rule import Rule, WorldSizes
from conformance.judging.run_failures import FailedRun, failed_run
from conformance.judging.verdict import NOT_CLAIMED, Failure, Found, Judgement, Verdict
from conformance.records.run import Run
from conformance.scenarios.hook import explained
from conformance.scenarios.model import Scenario
from conformance.session.blame import blamed_rule, consequence, owns
from conformance.session.plan import Plan
from conformance.session.run_sources import RunSource
from conformance.subjects.claims import Claims, default_claims
from conformance.subjects.references import claimed_references
from conformance.subjects.spec import REFERENCE, SubjectSpec, reference_of

MAX_HANGS = 3  # runs that may cost their whole deadline before the rest are not run
# Faults of a peer that a backend with streams reports through its watchdog, not through a future.
NOTICED_BY_FUTURES = ("peer_dies", "peer_dies_later", "peer_silent")


@dataclass(frozen=True)
class NotRun:
    """A run that there is none of, and why."""

    reason: str


class _NodeLost(Exception):
    """The run of a baseline was cut short; the text names the node."""


class _RuleCrashed(Exception):
    """A rule raised an exception of its own; the text is its traceback."""


class Engine:
    """Judges one subject.

    Args:
        source: the source of runs.
        rules: the whole book.
        subject: the judged subject.
        claims: its claims.
        worlds: world sizes of the session.
        control: the engine that judges the reference; None for the reference itself.

    Raises:
        UsageError: the claims exclude every world size.
    """

    def __init__(
        self,
        source: RunSource,
        rules: dict[str, Rule],
        subject: SubjectSpec,
        claims: Claims,
        worlds: Sequence[int],
        control: "Engine | None" = None,
    ) -> None:
        self.source = source
        self.subject = subject
        self.claims = claims
        self.control = control
        self.plan = Plan(subject.kind, claims, source.profile, worlds)
        if not self.plan.world_sizes:
            sizes = ",".join(map(str, worlds))
            raise UsageError(
                f"--world-size {sizes}: the subject claims "
                f"min_world_size({claims.min_world_size}); "
                f"add a world size of at least {claims.min_world_size}"
            )
        self._rules = rules
        self._runs: dict[tuple[str, int], Run | NotRun] = {}
        self._baselines: dict[tuple[str, Scenario], Run] = {}
        self._failed_runs: dict[str, FailedRun | None] = {}
        self._judgements: dict[str, Judgement] = {}
        self._hangs: list[str] = []
        self._announced: Sequence[str] = ()

    @property
    def primary(self) -> int:
        """The world size at which the plainest scenario is judged first."""
        return self.plan.primary

    @property
    def display_name(self) -> str:
        """The name of a control."""
        return (
            "the reference allreduce"
            if self.subject == REFERENCE
            else f"the reference ({self.subject.name})"
        )

    def judge(self, number: str) -> Judgement:
        """Return the judgement on one rule; its runs are made first."""
        if number not in self._judgements:
            self._judgements[number] = self._judge(self._rules[number])
        return self._judgements[number]

    def announce(self, numbers: Sequence[str]) -> None:
        """Announce the selected rules, so that their runs can be prefetched once the first run has
        passed.
        """
        self._announced = numbers

    def check_machine(self) -> None:
        """Certify the machine: the reference must pass the rules that certify it.

        Raises:
            KitError: it fails one.
        """
        if not self.control:
            return
        certify = [
            rule
            for rule in self._rules.values()
            if rule.certifies_machine
            and rule.kind == self.subject.kind
            and self._has_sizes_for(rule)
        ]
        self.control.announce([rule.number for rule in certify])
        for rule in certify:
            judgement = self.control.judge(rule.number)
            if not judgement.verdict.holds:
                detail = judgement.failures[0].actual if judgement.failures else judgement.reason
                raise KitError(
                    f"this machine is not fit to judge: {self.control.display_name} fails rule "
                    f"{rule.number}: {detail}"
                )

    def finished(self, scenario: Scenario) -> Run | None:
        """Return the run of a scenario at the primary world size, or None if there is none that
        ended well.
        """
        run = self._run(self.plan.adapted(scenario), self.primary)
        return run if isinstance(run, Run) and not self._failure_of(run) else None

    def would_hold(self, claims: Claims, numbers: Sequence[str]) -> bool:
        """Whether the runs made so far pass these rules under other claims."""
        for number in numbers:
            rule = self._rules[number]
            runs = [
                self._runs.get((scenario.name, size)) for scenario, size in self.plan.runs_of(rule)
            ]
            finished = [run for run in runs if isinstance(run, Run) and run.finished]
            if not finished and rule.judges_exact_results:
                return False
            records: list[Any] = list(finished)
            if rule.reads_all_runs and finished:
                records = [{run.name: run for run in finished}]
            for record in records:
                found = Found()
                rule.check(record, claims, found)
                if found.failures:
                    return False
        return True

    # --- one rule ---------------------------------------------------------------------------------

    def _judge(self, rule: Rule) -> Judgement:
        profile = self.source.profile
        if not self._is_claimed(rule):
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, NOT_CLAIMED)
        if rule.device not in ("", profile.device):
            reason = f"it applies on {rule.device} only, and this profile is {profile.name}"
            return Judgement(rule.number, Verdict.NOT_RUN, reason)
        excluded = self._reason_not_applicable(rule)
        if excluded is not None:
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, excluded)
        for number in self._needs(rule):
            needed = self.judge(number)
            if not needed.verdict.holds and (
                self._failed(number) or not self._is_responsible_for_a_run(rule)
            ):
                return Judgement(rule.number, Verdict.NOT_RUN, f"judged only if {number} holds")
        judgement = self._judge_runs(rule)
        if judgement.verdict is not Verdict.FAIL:
            return judgement
        self.source.forget()
        return self._confirmed(rule, judgement)

    def _confirmed(self, rule: Rule, judgement: Judgement) -> Judgement:
        """Return a failure as it is, unless the reference fails the same rule: then it is a kit
        error.
        """
        if not self.control:
            return judgement
        control = self.control.judge(rule.number)
        if control.verdict.holds:
            return judgement
        detail = control.reason or control.verdict
        reason = f"{self.control.display_name} does not pass it on this machine either ({detail})"
        return Judgement(rule.number, Verdict.KIT_ERROR, reason, judgement.failures, judgement.runs)

    def _judge_runs(self, rule: Rule) -> Judgement:
        wanted = self.plan.runs_of(rule)
        if not wanted and self.plan.below_minimum and rule.worlds is WorldSizes.OTHERS:
            reason = (
                f"under {self.claims} {self.plan.world_sizes[0]} is the only size of this profile"
            )
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, reason)
        names = {scenario.name for scenario, _ in wanted}
        if not wanted or (rule.reads_all_runs and names < {scenario.name for scenario in rule.on}):
            return Judgement(rule.number, Verdict.NOT_RUN, "no world size of this profile runs it")
        judgement = Judgement(rule.number, Verdict.PASS)
        usable: dict[str, Run] = {}
        baselines: dict[str, Run] = {}
        for scenario, size in wanted:
            run = self._run(scenario, size)
            name = f"{scenario.name}@{size}"
            if wrong := self._known_wrong_at(rule, size):
                _note(
                    judgement, name, Verdict.NOT_RUN, f"{wrong} does not hold at world size {size}"
                )
            elif isinstance(run, NotRun):
                _note(judgement, name, Verdict.NOT_RUN, run.reason)
            elif failed := self._failure_of(run):
                self._note_failed_run(rule, run, failed, judgement)
            elif not rule.reads_all_runs:
                self._note_findings(judgement, name, rule, run)
            else:
                try:
                    baselines |= self._baseline_runs(rule.baseline, scenario, size)
                    usable[name] = run
                except _NodeLost as error:
                    _note(judgement, name, Verdict.NOT_RUN, str(error))
        if rule.reads_all_runs and len(usable) == len(wanted):
            self._note_findings(judgement, _joined(list(usable)), rule, {**usable, **baselines})
        return judgement

    def _note_findings(
        self, judgement: Judgement, name: str, rule: Rule, records: Run | dict[str, Run]
    ) -> None:
        """Apply a rule to records.

        An exception of the rule is the kit's error, never a verdict on the subject.
        """
        try:
            found = self._apply(rule, records)
        except _RuleCrashed as error:
            _note(judgement, name, Verdict.KIT_ERROR, f"the rule itself failed: {error}")
            return
        verdict = found.verdict()
        reason = found.failures[0].actual if found.failures else found.not_applicable or ""
        if verdict is Verdict.FAIL and not judgement.failures:
            judgement.failures = found.failures
        if verdict is Verdict.NOT_RUN:
            reason = "nothing in the records to judge it on"
        figures = {
            "checks": found.checks,
            "margin": found.margin,
            "traffic": found.traffic,
            "notes": found.notes or None,
        }
        _note(judgement, name, verdict, reason, **figures)

    def _apply(self, rule: Rule, records: Run | dict[str, Run]) -> Found:
        found = Found()
        try:
            rule.check(records, self.claims, found)
        except Exception:
            raise _RuleCrashed(traceback.format_exc()) from None
        return found

    def _note_failed_run(
        self, rule: Rule, run: Run, failed: FailedRun, judgement: Judgement
    ) -> None:
        meaning = consequence(self._rules, rule, self.claims, run, failed)
        if meaning is None:
            return
        if meaning.verdict is Verdict.FAIL:
            cause = failed.cause or self._explain(run, failed)
            judgement.failures.append(Failure(failed.expected, failed.line, cause, failed.evidence))
        _note(judgement, run.name, meaning.verdict, meaning.reason, checks=meaning.checks)

    # --- whether a rule is judged -----------------------------------------------------------------

    def _is_claimed(self, rule: Rule) -> bool:
        return not rule.claimed or self.claims.has(rule.claimed)

    def _has_sizes_for(self, rule: Rule) -> bool:
        """Whether the session has a world size for a rule about the other world sizes."""
        return rule.worlds is not WorldSizes.OTHERS or len(self.plan.world_sizes) > 1

    def _reason_not_applicable(self, rule: Rule) -> str | None:
        """Return why a rule does not apply on this backend, or None if it does."""
        profile = self.source.profile
        if profile.ordered:
            if all(scenario.fault.kind in NOTICED_BY_FUTURES for scenario in rule.on):
                return (
                    f"on {profile.backend} a future is complete once its collective is enqueued; "
                    "its failure is "
                    "noticed by the backend's watchdog, which ends the process, and no hook can "
                    "hide it"
                )
        elif all(scenario.captured for scenario in rule.on):
            return f"{profile.backend}'s collectives cannot be captured"
        return None

    def _needs(self, rule: Rule) -> tuple[str, ...]:
        """Return the rules that a rule builds on; for a lossy subject section 13 takes the place of
        2.1 and 2.2.
        """
        lossy = [other for other in self._rules.values() if other.judges_lossy_results]
        is_one_of_them = rule.section in {other.section for other in lossy}
        needs_exact = any(self._rules[needed].judges_exact_results for needed in rule.needs)
        if self.claims.lossy and not is_one_of_them and needs_exact:
            return (*rule.needs, *(other.number for other in lossy))
        return rule.needs

    def _failed(self, number: str) -> bool:
        """Whether a rule failed, or was not run because a rule that it builds on failed."""
        verdict = self.judge(number).verdict
        if verdict is Verdict.NOT_RUN:
            return any(self._failed(needed) for needed in self._needs(self._rules[number]))
        return verdict in (Verdict.FAIL, Verdict.KIT_ERROR)

    def _is_responsible_for_a_run(self, rule: Rule) -> bool:
        """Whether a failed run fails this rule: its needs may be not run for that run alone."""
        for run in self._runs.values():
            if isinstance(run, Run) and owns(rule, run):
                failed = self._failure_of(run)
                if failed and blamed_rule(self._rules, run, failed) is None:
                    return True
        return False

    def _known_wrong_at(self, rule: Rule, size: int) -> str | None:
        """Return the rule that failed at a world size already, if this rule would only repeat its
        finding.
        """
        for other in self._rules.values():
            if other.kind != rule.kind or other.worlds is not WorldSizes.OTHERS:
                continue
            if (
                rule.number == other.number
                or size == self.primary
                or size not in self.plan.world_sizes
            ):
                continue
            if not any(self._builds_on(rule, needed) for needed in other.needs):
                continue
            plain = self.judge(other.number).runs.get(f"{self.plan.plainest.name}@{size}")
            if plain is not None and plain["verdict"] != str(Verdict.PASS):
                return other.number
        return None

    def _builds_on(self, rule: Rule, number: str) -> bool:
        if number in rule.needs:
            return True
        return any(self._builds_on(self._rules[needed], number) for needed in rule.needs)

    # --- runs -------------------------------------------------------------------------------------

    def _run(self, scenario: Scenario, size: int) -> Run | NotRun:
        """Return the run of a scenario, run once."""
        key = (scenario.name, size)
        if key not in self._runs:
            self._runs[key] = self._reason_not_run(scenario, size) or self._new_run(scenario, size)
            run = self._runs[key]
            failed = self._failure_of(run) if isinstance(run, Run) else None
            if failed and failed.kind == "hang":
                self._hangs.append(f"{scenario.name}@{size}")
            if failed:
                self.source.forget()
            elif key == (self.plan.plainest.name, self.primary):
                self.source.begin(self._scheduled_runs(), self.subject)
        return self._runs[key]

    def _new_run(self, scenario: Scenario, size: int) -> Run:
        # A group's own timeout can expire too early on a loaded machine: try again with a longer
        # one.
        for _ in range(3):
            run = self.source.run(scenario, size, self.subject, f"{scenario.name}@{size}")
            reached = all(rank.first("step", step=scenario.fault.step) for rank in run.ranks)
            if not scenario.fault.group_timeout or reached:
                break
            longer = replace(scenario.fault, group_timeout=4 * scenario.fault.group_timeout)
            scenario = replace(scenario, fault=longer)
        return run

    def _scheduled_runs(self) -> list[tuple[Scenario, int]]:
        """Return the runs that the announced rules will need."""
        rules = [self._rules[number] for number in self._announced]
        wanted = [
            run for rule in rules if self._is_claimed(rule) for run in self.plan.runs_of(rule)
        ]
        return [
            (scenario, size)
            for scenario, size in dict.fromkeys(wanted)
            if not scenario.resume.resumes and (scenario.name, size) not in self._runs
        ]

    def _reason_not_run(self, scenario: Scenario, size: int) -> NotRun | None:
        hung = next((name for name in self._hangs if name.startswith(f"{scenario.name}@")), None)
        if hung is not None:
            return NotRun(f"not tried: it hung in {hung}")
        if len(self._hangs) >= MAX_HANGS:
            return NotRun(f"not tried: it hung in {', '.join(self._hangs)}")
        for plainer in self.plan.prerequisites(scenario, size):
            run = self._run(plainer, size)
            if isinstance(run, NotRun) or self._failure_of(run):
                return NotRun(f"not tried: {plainer.name}@{size} broke")
        return None

    def _failure_of(self, run: Run) -> FailedRun | None:
        """Return why a run failed, or None.

        Raises:
            KitError, TargetError: the failure is not a verdict on the subject.
        """
        if run.name not in self._failed_runs:
            failed = failed_run(run)
            self._failed_runs[run.name] = failed
            if failed and failed.kind == "kit":
                raise KitError(failed.line)
            if failed and failed.kind == "target" and run.world >= self.claims.min_world_size:
                raise TargetError(failed.line)
        return self._failed_runs[run.name]

    def _baseline_runs(self, baseline: str, scenario: Scenario, size: int) -> dict[str, Run]:
        """Return the runs that a rule compares the subject's run with, each run once.

        Raises:
            _NodeLost: one was cut short.
            TargetError: the claimed reference does not run under these options.
            KitError: vanilla DDP does not run.
        """
        named: dict[str, SubjectSpec | None] = {}
        runs_of_baseline = self._baselines
        if baseline == "vanilla" and not (
            self.claims.lossy or self.claims.fused or self.claims.sum
        ):
            named = {"vanilla": None}
            # Vanilla DDP is the same for all subjects, so that the control keeps its runs.
            runs_of_baseline = (self.control or self)._baselines
        elif baseline == "like":
            named = {
                f"like_{number}": spec
                for number, spec in enumerate(claimed_references(self.claims))
            }
        # The call after backward is the subject's own.
        scenario = replace(scenario, poststep=False, call="")
        runs = {}
        for prefix, subject in named.items():
            name = f"{prefix}-{scenario.name}@{size}"
            key = (name, scenario)
            if key not in runs_of_baseline:
                runs_of_baseline[key] = self.source.run(scenario, size, subject, name)
            run = runs_of_baseline[key]
            failed = failed_run(run)
            if failed and failed.kind == "node":
                del runs_of_baseline[key]
                raise _NodeLost(failed.line)
            if failed and subject:
                raise TargetError(
                    f"--claims {self.claims}: the reference itself does not run so: {failed.line}"
                )
            if failed:
                raise KitError(f"DDP without a hook does not run {name}: {failed.line}")
            runs[name] = run
        return runs

    def _explain(self, run: Run, failed: FailedRun) -> str:
        """Repeat a failed run with its collectives on record, and return the first on which ranks
        disagree.
        """
        scenario = run.scenario
        may_disagree = failed.kind in ("hang", "died", "raised") and run.world > 1
        if not may_disagree or scenario.fault.kind != "none" or scenario.resume.resumes:
            return ""
        scenario = explained(scenario)
        name = f"{scenario.name}@{run.world}"
        try:
            return disagreement(self.source.run(scenario, run.world, self.subject, name))
        except UsageError:
            return ""  # the replayed records do not hold this run


def _note(judgement: Judgement, name: str, verdict: Verdict, reason: str, **figures: Any) -> None:
    """Enter one run into a judgement; the worst verdict is the judgement's."""
    entry = {"verdict": str(verdict), "reason": reason, **figures}
    judgement.runs[name] = {key: value for key, value in entry.items() if value is not None}
    if verdict > judgement.verdict:
        judgement.verdict = verdict
        judgement.reason = f"{name}: {reason}"


def _joined(names: list[str]) -> str:
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} more"]
    return " and ".join(names)


def make_control(
    source: RunSource, rules: dict[str, Rule], kind: str, worlds: Sequence[int]
) -> Engine:
    """Return the engine that judges the reference of a kind."""
    reference = reference_of(kind)
    return Engine(source, rules, reference, default_claims(kind, reference.arguments), worlds)


def make_engine(
    source: RunSource,
    rules: dict[str, Rule],
    subject: SubjectSpec,
    claims: Claims,
    worlds: Sequence[int],
) -> Engine:
    """Return the engine for a subject, with the reference of its kind as its control."""
    return Engine(
        source, rules, subject, claims, worlds, make_control(source, rules, subject.kind, worlds)
    )
