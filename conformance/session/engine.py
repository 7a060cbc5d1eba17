"""From a subject to judgements: runs each scenario once, and applies the rules.

A failure is the subject's only if the reference of its kind passes the same rule on the same
machine: the control. If the reference fails too, the verdict is "kit error". ``plan.py`` decides
which runs a rule reads, and ``blame.py`` which rule a failed run fails.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.errors import KitError, UsageError
from conformance.judging.rule import Rule, WorldSizes
from conformance.judging.run_failures import FailedRun
from conformance.judging.verdict import NOT_CLAIMED, Failure, Judgement, Verdict
from conformance.records.run import Run
from conformance.scenarios.model import Scenario
from conformance.session.apply_rule import RuleCrashed, apply_rule, note_findings
from conformance.session.blame import (
    blamed_rule,
    consequence,
    is_responsible,
    missing_claim,
    missing_state,
    owns,
    refuses_scenario,
)
from conformance.session.coverage import Measured, measure, runs_of
from conformance.session.judging_order import JudgingOrder
from conformance.session.plan import Plan
from conformance.session.prerequisites import builds_on, needs_of, reason_not_applicable
from conformance.session.probes import Probes, adapted_probe
from conformance.session.progress import Progress
from conformance.session.run_maker import NodeLost, NotRun, RunMaker
from conformance.session.run_sources import RunSource
from conformance.session.wanted_runs import WantedRuns, is_claimed
from conformance.subjects.claims import Claims, default_claims
from conformance.subjects.spec import REFERENCE, SubjectSpec, reference_of


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
        self.plan = Plan(
            subject.kind,
            claims,
            source.profile,
            worlds,
            source.seed,
            source.steps,
            source.limit,
        )
        if not self.plan.world_sizes:
            sizes = ",".join(map(str, worlds))
            raise UsageError(
                f"--world-size {sizes}: the subject claims "
                f"min_world_size({claims.min_world_size}); "
                f"add a world size of at least {claims.min_world_size}"
            )
        self._rules = rules
        self._order = JudgingOrder(rules, claims)
        self._judgements: dict[str, Judgement] = {}
        self.wanted = WantedRuns(rules, self.plan, subject.kind, claims, source.profile)
        self.probes = Probes(subject, claims, self.plan, source.capacity)
        self.maker: RunMaker = RunMaker(
            source,
            self.plan,
            subject,
            claims,
            control.maker if control else None,
            lambda: self.wanted.not_among(self.maker.made),
        )

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

    @property
    def runs(self) -> list[Run]:
        """The subject's runs so far."""
        return [run for run in self.maker.made.values() if isinstance(run, Run)]

    def judge(self, number: str) -> Judgement:
        """Return the judgement on one rule; its runs are made first."""
        if number not in self._judgements:
            for other in self._order.before(number, self.wanted.announced):
                # The runs of a broken subject may hang, and a rule that fails ends a session of -x.
                if self.judge(other).verdict in (Verdict.FAIL, Verdict.KIT_ERROR):
                    break
            self._judgements[number] = self._judge(self._rules[number])
        return self._judgements[number]

    @property
    def judgements(self) -> Mapping[str, Judgement]:
        """All judgements made so far, also those on rules that only others build on."""
        return self._judgements

    def blamed(self) -> dict[str, str]:
        """Return the rules that broken runs are blamed on, each with its first reason."""
        reasons: dict[str, str] = {}
        for run in runs_of(self.maker.made):
            if failed := self.maker.failure_of(run):
                rule = blamed_rule(self._rules, run, failed)
                owners = [one for one in self._rules.values() if owns(one, run)]
                for one in [rule] if rule else owners[:1]:
                    reasons.setdefault(one.number, f"{failed.line} [{run.name}]")
        return reasons

    def announce(self, numbers: Sequence[str]) -> None:
        """Announce the selected rules, so that their runs can be prefetched once the first run has
        passed.
        """
        self.wanted.announce(numbers)

    def show(self, progress: Progress) -> None:
        """Show the runs on a terminal while they are waited for."""
        if progress.terminal is None:
            return

        def waits_for(name: str) -> None:
            progress.run(name, len(self.maker.made), self.wanted.count())

        self.maker.waits_for = waits_for
        if self.control:
            self.control.maker.waits_for = lambda name: progress.run(f"reference, {name}", 0, 0)

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
        run = self.maker.run(self.plan.adapted(scenario), self.primary)
        return run if isinstance(run, Run) and not self.maker.failure_of(run) else None

    def coverage(self) -> Measured:
        """Return the coverage of the subject's own files over the runs that were made so far."""
        return measure(runs_of(self.maker.made))

    def would_hold(self, claims: Claims, numbers: Sequence[str]) -> bool:
        """Whether the runs made so far pass these rules under other claims."""
        for number in numbers:
            rule = self._rules[number]
            runs = [
                self.maker.made.get((scenario.name, size))
                for scenario, size in self.plan.runs_of(rule)
            ]
            finished = [run for run in runs if isinstance(run, Run) and run.finished]
            if not finished and rule.judges_exact_results:
                return False
            records: list[Any] = list(finished)
            if rule.reads_all_runs and finished:
                records = [{run.name: run for run in finished}]
            for record in records:
                try:
                    found = apply_rule(rule, record, claims)
                except RuleCrashed:
                    return False
                if found.failures:
                    return False
        return True

    # --- one rule ---------------------------------------------------------------------------------

    def _judge(self, rule: Rule) -> Judgement:
        profile = self.source.profile
        if not is_claimed(rule, self.claims):
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, NOT_CLAIMED)
        if rule.device not in ("", profile.device):
            reason = f"it applies on {rule.device} only, and this profile is {profile.name}"
            return Judgement(rule.number, Verdict.NOT_RUN, reason)
        if rule.unless and self.claims.has(rule.unless):
            reason = f"the subject claims {rule.unless}"
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, reason)
        excluded = reason_not_applicable(rule, self.source.profile)
        if excluded is not None:
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, excluded)
        if not self.plan.runs_of(rule) and (beyond := self._beyond_limit(rule)):
            return beyond
        for number in needs_of(rule, self._rules, self.claims):
            needed = self.judge(number)
            if not needed.verdict.holds and (
                self._failed(number) or not self._is_responsible_for_a_run(rule)
            ):
                also = ", which was not run either" * (needed.verdict is Verdict.NOT_RUN)
                reason = f"judged only if {number} holds{also}"
                return Judgement(rule.number, Verdict.NOT_RUN, reason)
        for number in rule.presumes:
            if (verdict := self.judge(number).verdict) is not Verdict.PASS:
                says = "does not apply" if verdict.holds else "does not hold"
                reason = f"it needs {number}, which {says}"
                return Judgement(rule.number, Verdict.NOT_APPLICABLE, reason)
        judgement = self._judgement_on(rule)
        if judgement.verdict is not Verdict.FAIL:
            return judgement
        self.source.forget()
        return self._confirmed(rule, judgement)

    def _judgement_on(self, rule: Rule) -> Judgement:
        """Judge a rule by the runs that it reads: its own, those of all rules, or probes."""
        if rule.watches:
            return self._judge_watched(rule)
        if rule.probes:
            return self._judge_probes(rule)
        return self._judge_runs(rule)

    def _confirmed(self, rule: Rule, judgement: Judgement) -> Judgement:
        """Return a failure as it is, unless the reference fails the same rule: then it is a kit
        error.
        """
        if not self.control:
            return judgement
        control = self._control_of(rule, judgement)
        if control.verdict.holds:
            return judgement
        detail = control.reason or control.verdict
        reason = f"{self.control.display_name} does not pass it on this machine either ({detail})"
        return Judgement(rule.number, Verdict.KIT_ERROR, reason, judgement.failures, judgement.runs)

    def _control_of(self, rule: Rule, judgement: Judgement) -> Judgement:
        """Return the control's judgement on a rule.

        It is judged on the same runs if they are probes, and on the failed one alone if the rule
        watches every run: the reference need not make all of these.
        """
        assert self.control is not None
        if rule.watches:
            # The last run is the one that failed.
            name, _, size = list(judgement.runs)[-1].rpartition("@")
            return self.control.watched(rule, name, int(size))
        if not rule.probes:
            control = self.control.judge(rule.number)
            if control.verdict is not Verdict.NOT_RUN:
                return control
            # A rule that this one builds on was not run, and has not failed: the subject's own run
            # failed nevertheless.
            return self.control._judgement_on(rule)
        failed = [
            run
            for run in runs_of(self.maker.made)
            if judgement.runs.get(run.name, {}).get("verdict") == str(Verdict.FAIL)
        ]
        control = Judgement(rule.number, Verdict.PASS)
        for run in failed:
            scenario = adapted_probe(run.scenario, self.control.plan, self.control.claims)
            self.control._note_run(rule, scenario, run.world, control)
        return control

    def _judge_probes(self, rule: Rule) -> Judgement:
        """Judge a rule on runs for the numbers in the subject's own code."""
        # The plainest run shows which branches it takes.
        self.maker.run(self.plan.adapted(self.plan.plainest), self.primary)
        judgement = Judgement(rule.number, Verdict.PASS)
        while judgement.verdict <= Verdict.NOT_APPLICABLE:
            wanted = self.probes.next(self.coverage())
            if not wanted:
                break
            self.maker.begin([(one.scenario, one.world) for one in wanted])
            for one in wanted:
                one.entry["runs"].append(f"{one.scenario.name}@{one.world}")
                self._note_run(rule, one.scenario, one.world, judgement)
        if not judgement.runs:
            reason = self.probes.reason(self.coverage())
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, reason)
        return judgement

    def _note_run(self, rule: Rule, scenario: Scenario, size: int, judgement: Judgement) -> None:
        """Make one run and enter the rule's verdict on it into a judgement."""
        try:
            run = self.maker.run(scenario, size)
        except UsageError as error:
            run = NotRun(str(error))  # the replayed records do not hold it
        name = f"{scenario.name}@{size}"
        if isinstance(run, NotRun):
            judgement.note_run(name, Verdict.NOT_RUN, run.reason)
        elif failed := self.maker.failure_of(run):
            self._note_failed_run(rule, run, failed, judgement)
        else:
            try:
                note_findings(judgement, name, rule, self._with_baseline(rule, run), self.claims)
            except NodeLost as error:
                judgement.note_run(name, Verdict.NOT_RUN, str(error))

    def _with_baseline(self, rule: Rule, run: Run) -> Run | dict[str, Run]:
        """Return what a rule reads of one run: the run, or a dict with it and its baselines."""
        scenario, size = run.scenario, run.world
        if rule.reads_all_runs:
            return {run.name: run, **self.maker.baseline_runs(rule.baseline, scenario, size)}
        self._set_beside(rule, run, scenario, size)
        return run

    def _judge_runs(self, rule: Rule) -> Judgement:
        wanted = self.plan.runs_of(rule)
        if not wanted and self.plan.below_minimum and rule.worlds is WorldSizes.OTHERS:
            reason = (
                f"under {self.claims} {self.plan.world_sizes[0]} is the only size of this profile"
            )
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, reason)
        names = {scenario.name for scenario, _ in wanted}
        if not wanted or (
            rule.reads_all_runs and names < {one.name for one in self.plan.scenarios_of(rule)}
        ):
            return Judgement(rule.number, Verdict.NOT_RUN, "no world size of this profile runs it")
        judgement = Judgement(rule.number, Verdict.PASS)
        usable: dict[str, Run] = {}
        refused = 0
        baselines: dict[str, Run] = {}
        for scenario, size in wanted:
            run = self.maker.run(scenario, size)
            name = f"{scenario.name}@{size}"
            if wrong := self._known_wrong_at(rule, size):
                judgement.note_run(
                    name, Verdict.NOT_RUN, f"{wrong} does not hold at world size {size}"
                )
            elif isinstance(run, NotRun):
                judgement.note_run(name, Verdict.NOT_RUN, run.reason)
            elif failed := self.maker.failure_of(run):
                self._note_failed_run(rule, run, failed, judgement)
                refused += refuses_scenario(rule, run)
            elif not rule.reads_all_runs:
                try:
                    note_findings(
                        judgement, name, rule, self._with_baseline(rule, run), self.claims
                    )
                except NodeLost as error:
                    judgement.note_run(name, Verdict.NOT_RUN, str(error))
            else:
                try:
                    baselines |= self.maker.baseline_runs(rule.baseline, scenario, size)
                    usable[name] = run
                except NodeLost as error:
                    judgement.note_run(name, Verdict.NOT_RUN, str(error))
        if rule.reads_all_runs and len(usable) + refused == len(wanted):
            runs = {**usable, **baselines}
            note_findings(judgement, _joined(list(usable)), rule, runs, self.claims)
        # A rule without any check had no chance to fail, whatever its runs say.
        if judgement.verdict is Verdict.PASS and not judgement.checks:
            judgement.verdict = Verdict.NOT_RUN
            judgement.reason = "none of its runs had anything to judge it on"
        return judgement

    def _set_beside(self, rule: Rule, run: Run, scenario: Scenario, size: int) -> None:
        """Put the run of the claimed reference beside a run that a rule compares with it."""
        if rule.baseline == "like" and self.claims.has("like"):
            (run.reference,) = self.maker.baseline_runs("like", scenario, size).values()

    def _judge_watched(self, rule: Rule) -> Judgement:
        """Apply a rule to every run that the other rules of its kind need, until it fails."""
        judgement = Judgement(rule.number, Verdict.PASS)
        for scenario, size in self.wanted.watched():
            self._watch(rule, scenario, size, judgement)
            if judgement.verdict >= Verdict.FAIL:
                break
        if not judgement.runs:
            return Judgement(rule.number, Verdict.NOT_RUN, "nothing in the records to judge it on")
        return judgement

    def watched(self, rule: Rule, name: str, size: int) -> Judgement:
        """Return the judgement on one run alone of a rule that watches every run."""
        judgement = Judgement(rule.number, Verdict.PASS)
        self._watch(rule, self.plan.named(name), size, judgement)
        return judgement

    def _watch(self, rule: Rule, scenario: Scenario, size: int, judgement: Judgement) -> None:
        """Apply a rule that watches every run to one of them, unless the run has failed."""
        run = self.maker.run(scenario, size)
        if isinstance(run, NotRun):
            return
        failed = self.maker.failure_of(run)
        if failed is None:
            note_findings(judgement, run.name, rule, run, self.claims)
        elif is_responsible(self._rules, rule, run, failed):
            self._note_failed_run(rule, run, failed, judgement)

    def _beyond_limit(self, rule: Rule) -> Judgement | None:
        """Return the judgement on a rule whose scenarios all need too many ranks, if they do."""
        sizes = self.plan.beyond_limit(rule)
        limit = self.source.limit
        if not sizes or limit is None:
            return None
        verdict = Verdict.NOT_RUN if limit.is_chosen else Verdict.NOT_APPLICABLE
        reason = f"its run has {max(sizes)} ranks: {limit.reason}"
        return Judgement(rule.number, verdict, reason)

    def _note_failed_run(
        self, rule: Rule, run: Run, failed: FailedRun, judgement: Judgement
    ) -> None:
        meaning = consequence(self._rules, rule, self.claims, run, failed)
        if meaning is None:
            return
        if meaning.verdict is Verdict.FAIL:
            cause = (
                failed.cause
                or missing_state(self.subject, failed)
                or missing_claim(self.claims, run, failed)
                or self.maker.explain(run, failed)
            )
            judgement.failures.append(Failure(failed.expected, failed.line, cause, failed.evidence))
        elif meaning.verdict is Verdict.KIT_ERROR:
            judgement.failures.append(Failure(failed.expected, failed.line, "", failed.evidence))
        judgement.note_run(run.name, meaning.verdict, meaning.reason, checks=meaning.checks)

    # --- whether a rule is judged -----------------------------------------------------------------

    def _has_sizes_for(self, rule: Rule) -> bool:
        """Whether the session has a world size for a rule about the other world sizes."""
        return rule.worlds is not WorldSizes.OTHERS or len(self.plan.world_sizes) > 1

    def _failed(self, number: str) -> bool:
        """Whether a rule failed, or was not run because a rule that it builds on failed."""
        verdict = self.judge(number).verdict
        if verdict is Verdict.NOT_RUN:
            return any(
                self._failed(needed)
                for needed in needs_of(self._rules[number], self._rules, self.claims)
            )
        return verdict in (Verdict.FAIL, Verdict.KIT_ERROR)

    def _is_responsible_for_a_run(self, rule: Rule) -> bool:
        """Whether a failed run fails this rule: its needs may be not run for that run alone."""
        for run in self.maker.made.values():
            if isinstance(run, Run) and owns(rule, run):
                failed = self.maker.failure_of(run)
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
            if not any(builds_on(rule, needed, self._rules) for needed in other.needs):
                continue
            plain = self.judge(other.number).runs.get(f"{self.plan.plainest.name}@{size}")
            if plain is not None and plain["verdict"] != str(Verdict.PASS):
                return other.number
        return None


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
