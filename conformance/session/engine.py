"""From a subject to judgements: runs each scenario once, and asks the rules.

Who is to blame. A run that broke fails the rule that its kind of breaking belongs to (a refused
registration is 1.1's, something that is no future 1.2's, ...), or else the rule that owns its
scenario; for every other rule that reads it the run is "not run". A failure is only ever the
subject's when the reference allreduce passes the same rule on the same machine: the control. If it
does not, the verdict is "kit error".
"""

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from conformance.errors import KitError, TargetError, UsageError
from conformance.judging.collective_order import disagreement
from conformance.judging.oracles.mean import compare
from conformance.judging.rule import Rule, WorldSizes
from conformance.judging.run_failures import FailedRun, failed_run, refused_on_every_rank
from conformance.judging.verdict import NOT_CLAIMED, Failure, Found, Judgement, Verdict
from conformance.records.run import Run
from conformance.scenarios.hook import BY_NAME, NORMAL, VALUES, explained
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.session.plan import adapt_scenario
from conformance.subjects.claims import ROUNDED_DTYPES, Claims, default_claims
from conformance.subjects.kinds import HOOK, KINDS
from conformance.subjects.references import like_other, subjects
from conformance.subjects.spec import REFERENCE, SubjectSpec, parse_other
from conformance.subjects.target import parse_target

HANGS = 3  # runs that may cost their whole deadline before the rest are not run
# Faults of a peer, where the backend's futures are completed when all are through.
NOTICED_BY_FUTURES = ("peer_dies", "peer_dies_later", "peer_silent")


class Source:
    """Where runs come from: ranks of this machine, or records kept earlier.

    Attributes:
        profile: of all of them.
    """

    profile: Profile = GLOO_CPU

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        """Return a run."""
        raise NotImplementedError

    def begin(self, runs: Iterable[tuple[Scenario, int]], subject: SubjectSpec | None) -> None:
        """Take note of runs that will be asked for unless one of them breaks; they may be begun."""

    def forget(self) -> None:
        """Begin no more of them."""


class _NodeLost(Exception):
    """A run that a subject is compared with was cut short; by what, the text says."""


class Engine:
    """Judges one subject.

    Args:
        source: where runs come from.
        rules: the whole book.
        subject: what is judged.
        claims: what it says of itself.
        worlds: world sizes of the profile.
        control: the engine that judges the reference; None for the reference itself.
    """

    def __init__(
        self, source: Source, rules: dict[str, Rule], subject: SubjectSpec, claims: Claims, worlds: Sequence[int],
        control: "Engine | None" = None,
    ) -> None:  # fmt: skip
        self.source, self._rules, self.subject, self.claims = source, rules, subject, claims
        self.worlds = tuple(sorted(world for world in worlds if world >= claims.min_world_size))
        self._fewer = tuple(sorted(set(worlds) - set(self.worlds)))
        if not self.worlds:
            raise UsageError(f"--world-size {','.join(map(str, worlds))}: it claims {claims}, so that nothing can be judged")
        self.control = control
        self._runs: dict[tuple[str, int], Run | str] = {}
        self._others: dict[tuple[str, Scenario], Run] = {}
        self._breakages: dict[str, FailedRun | None] = {}
        self._judgements: dict[str, Judgement] = {}
        self._hangs: list[str] = []
        self._expected: Sequence[str] = ()
        kind = KINDS.get(subject.kind)
        self._plain = kind.scenarios[0] if kind else VALUES
        self._by_name = {scenario.name: scenario for scenario in kind.scenarios} if kind else BY_NAME

    @property
    def primary(self) -> int:
        """The world size at which the plainest scenario is judged first."""
        return next((world for world in self.worlds if world > 1), self.worlds[0])

    def judge(self, number: str) -> Judgement:
        """Return the judgement on one rule; runs what it needs that has not been run yet."""
        if number not in self._judgements:
            self._judgements[number] = self._judge(self._rules[number])
        return self._judgements[number]

    def expect(self, numbers: Sequence[str]) -> None:
        """Say which rules will be asked about: once the plainest run is good, the others need not wait for the question."""
        self._expected = numbers

    def check_machine(self) -> None:
        """Certify the machine: the reference must hold the machine rules.

        Raises:
            KitError: it does not.
        """
        if not self.control:
            return
        certify = [rule.number for rule in self._rules.values() if rule.certifies_machine and rule.kind == self.subject.kind]
        self.control.expect(certify)
        for number in certify:
            judgement = self.control.judge(number)
            if not judgement.verdict.holds and not (number == "2.6" and len(self.worlds) == 1):
                detail = judgement.failures[0].actual if judgement.failures else judgement.reason
                raise KitError(f"this machine is not fit to judge: {self.control.display_name} fails rule {number}: {detail}")

    @property
    def display_name(self) -> str:
        """What a control is called."""
        return "the reference allreduce" if self.subject == REFERENCE else f"the reference ({self.subject.name})"

    def other_claims(self) -> list[Claims]:
        """Return the claims under which the subject would hold what it fails now of sections 2 and 8."""
        if self.claims.lossy or self.subject.kind != HOOK:
            return []
        candidates = [
            replace(self.claims, rounded=rounded, sum=total, world_only=world)
            for world in (False, True)
            for total in (False, True)
            for rounded in (None, *ROUNDED_DTYPES)
        ]
        tried = ("2.1", "2.2", "2.3", "2.6", "2.7", "2.10")
        return [claims for claims in candidates if claims != self.claims and self._would_hold(claims, tried)][:3]

    def exact_steps(self) -> int:
        """Return how many steps give the exact mean before the first that does not, on inputs that no compression keeps."""
        run = self.finished(NORMAL)
        if run is None:
            return 0
        wrong = (step for step in range(len(run.scenario.steps)) if compare(run, step, Claims()).mismatch)
        return next(wrong, len(run.scenario.steps))

    def finished(self, scenario: Scenario) -> Run | None:
        """Return the run of a scenario at the primary world size, or None where there is none that came to its end."""
        run = self._run(self._under(scenario), self.primary)
        return run if isinstance(run, Run) and not self._breakage(run) else None

    def _would_hold(self, claims: Claims, numbers: Sequence[str]) -> bool:
        for number in numbers:
            rule = self._rules[number]
            runs = [self._runs.get((s.name, w)) for s, w in self._wanted(rule)]
            finished = [run for run in runs if isinstance(run, Run) and run.finished]
            if not finished and number in ("2.1", "2.2"):
                return False
            for records in [{run.name: run for run in finished}] if rule.reads_all_runs and finished else finished:
                found = Found()
                rule.check(records, claims, found)
                if found.failures:
                    return False
        return True

    def _judge(self, rule: Rule) -> Judgement:
        if not self._applies(rule):
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, NOT_CLAIMED)
        if rule.device not in ("", self.source.profile.device):
            return Judgement(rule.number, Verdict.NOT_RUN, f"it speaks of {rule.device}, and this profile is {self.source.profile.name}")
        if reason := self._not_here(rule):
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, reason)
        for number in self._needs(rule):
            needed = self.judge(number)
            if not needed.verdict.holds and (self._failed(number) or not self._has_broken(rule)):
                return Judgement(rule.number, Verdict.NOT_RUN, f"judged only where {number} holds")
        judgement = self._judge_runs(rule)
        if judgement.verdict is Verdict.FAIL:
            self.source.forget()
        if judgement.verdict is Verdict.FAIL and self.control:
            control = self.control.judge(rule.number)
            if not control.verdict.holds:
                reason = f"{self.control.display_name} does not pass it on this machine either ({control.reason or control.verdict})"
                return Judgement(rule.number, Verdict.KIT_ERROR, reason, judgement.failures, judgement.runs)
        return judgement

    def _failed(self, number: str) -> bool:
        """Whether a rule that is judged, or one that it builds on, has failed: then the rest is left alone."""
        verdict = self.judge(number).verdict
        return verdict in (Verdict.FAIL, Verdict.KIT_ERROR) or (
            verdict is Verdict.NOT_RUN and any(self._failed(needed) for needed in self._needs(self._rules[number]))
        )

    def _has_broken(self, rule: Rule) -> bool:
        """Whether a run has broken that is this rule's to speak of: what it builds on may be not run for that alone."""
        runs = [run for run in self._runs.values() if isinstance(run, Run) and self._owns(rule, run)]
        return any((broken := self._breakage(run)) and not self._blamed(run, broken) for run in runs)

    @staticmethod
    def _owns(rule: Rule, run: Run) -> bool:
        return run.scenario.name in {scenario.name for scenario in rule.owns}

    def _under(self, scenario: Scenario) -> Scenario:
        """Return a scenario as it is run here for this subject."""
        return adapt_scenario(scenario, self.claims, self.source.profile)

    def _not_here(self, rule: Rule) -> str:
        """Return why what a rule asks is no question to a subject on this backend; '' where it is one."""
        profile = self.source.profile
        if all(scenario.captured for scenario in rule.on) and not profile.ordered:
            return f"{profile.backend}'s collectives cannot be captured"
        if not profile.ordered or not all(scenario.fault.kind in NOTICED_BY_FUTURES for scenario in rule.on):
            return ""
        return (
            f"on {profile.backend} a future is complete once its collective is enqueued: that it failed is noticed by the backend's "
            "watchdog, which ends the process, and no hook can hide it"
        )

    def _applies(self, rule: Rule) -> bool:
        return not rule.claimed or self.claims.has(rule.claimed)

    def _needs(self, rule: Rule) -> tuple[str, ...]:
        """Return what the rule builds on; where the result is lossy, section 13 takes the place of 2.1 and 2.2."""
        if self.claims.lossy and rule.section != "13" and {"2.1", "2.2"} & set(rule.needs):
            return (*rule.needs, *(other.number for other in self._rules.values() if other.judges_lossy_results))
        return rule.needs

    def _judge_runs(self, rule: Rule) -> Judgement:
        wanted = self._wanted(rule)
        if not wanted and self._fewer and rule.worlds is WorldSizes.OTHERS:
            return Judgement(rule.number, Verdict.NOT_APPLICABLE, f"under {self.claims} {self.worlds[0]} is the only size of this profile")
        if not wanted or (rule.reads_all_runs and {scenario.name for scenario, _ in wanted} < {scenario.name for scenario in rule.on}):
            return Judgement(rule.number, Verdict.NOT_RUN, "no world size of this profile runs it")
        judgement = Judgement(rule.number, Verdict.PASS)
        usable: dict[str, Run] = {}
        beside: dict[str, Run] = {}
        for scenario, world in wanted:
            run = self._run(scenario, world)
            if self._wrong_at(rule, world):
                self._note(judgement, f"{scenario.name}@{world}", Verdict.NOT_RUN, reason=f"2.6 does not hold at world size {world}")
            elif isinstance(run, str):
                self._note(judgement, f"{scenario.name}@{world}", Verdict.NOT_RUN, reason=run)
            elif broken := self._breakage(run):
                self._note_broken(rule, run, broken, judgement)
            elif rule.reads_all_runs:
                try:
                    beside |= self._beside(rule.baseline, scenario, world)
                    usable[run.name] = run
                except _NodeLost as error:
                    self._note(judgement, run.name, Verdict.NOT_RUN, reason=str(error))
            else:
                self._note_found(judgement, run.name, self._ask(rule, run))
        if rule.reads_all_runs and len(usable) == len(wanted):
            names = list(usable) if len(usable) < 4 else [*list(usable)[:2], f"{len(usable) - 2} more"]
            self._note_found(judgement, " and ".join(names), self._ask(rule, {**usable, **beside}))
        return judgement

    def _beside(self, what: str, scenario: Scenario, world: int) -> dict[str, Run]:
        """Return the runs of what a rule looks at beside the subject, each run once; vanilla DDP is the same for all subjects."""
        named: dict[str, SubjectSpec | None] = {}
        if what == "vanilla" and not (self.claims.lossy or self.claims.fused or self.claims.sum):
            named = {"vanilla": None}
        elif what == "like":
            references = subjects(self.claims.like) if self.subject.kind == HOOK else [like_other(self.claims)]
            named = {f"like_{number}": reference for number, reference in enumerate(references)}
        others = (self.control or self)._others if what == "vanilla" else self._others
        runs = {}
        scenario = replace(scenario, poststep=False, call="")  # which is the subject's own
        for prefix, subject in named.items():
            name = f"{prefix}-{scenario.name}@{world}"
            if (name, scenario) not in others:
                others[name, scenario] = self.source.run(scenario, world, subject, name)
            runs[name] = others[name, scenario]
            if (broken := failed_run(runs[name])) and broken.kind == "node":
                del others[name, scenario]
                raise _NodeLost(broken.line)
            if (broken := failed_run(runs[name])) and subject:
                raise TargetError(f"--claims {self.claims}: the reference itself does not run so: {broken.line}")
            if broken:
                raise KitError(f"DDP without a hook does not run {name}: {broken.line}")
        return runs

    def _wanted(self, rule: Rule) -> list[tuple[Scenario, int]]:
        if rule.worlds is WorldSizes.BELOW_MINIMUM:
            return [(self._under(plain), world) for plain in rule.on for world in self._fewer]
        pairs = [(scenario, world) for plain in rule.on for scenario in [self._under(plain)] for world in scenario.fits(self.worlds)]
        if rule.worlds is WorldSizes.PRIMARY:
            return [(s, w) for s, w in pairs if w == self.primary]
        if rule.worlds is WorldSizes.OTHERS:
            return [(s, w) for s, w in pairs if w != self.primary]
        return pairs

    def _run(self, scenario: Scenario, world: int) -> Run | str:
        """Return the run, or why there is none."""
        key = (scenario.name, world)
        if key not in self._runs:
            self._runs[key] = self._why_not(scenario, world) or self._new_run(scenario, world)
            run = self._runs[key]
            broken = self._breakage(run) if isinstance(run, Run) else None
            if broken and broken.kind == "hang":
                self._hangs.append(f"{scenario.name}@{world}")
            if broken:
                self.source.forget()
            elif key == (self._plain.name, self.primary):
                self.source.begin(self._coming(), self.subject)
        return self._runs[key]

    def _coming(self) -> list[tuple[Scenario, int]]:
        rules = [self._rules[number] for number in self._expected if self._applies(self._rules[number])]
        wanted = [pair for rule in rules for pair in self._wanted(rule) if not pair[0].resume.resumes]
        return [(scenario, world) for scenario, world in dict.fromkeys(wanted) if (scenario.name, world) not in self._runs]

    def _new_run(self, scenario: Scenario, world: int) -> Run:
        """Run it. Where a group's timeout is to expire it can do so too early on a loaded machine: tried again, longer."""
        for _ in range(3):
            run = self.source.run(scenario, world, self.subject, f"{scenario.name}@{world}")
            if not scenario.fault.group_timeout or all(rank.first("step", step=scenario.fault.step) for rank in run.ranks):
                break
            scenario = replace(scenario, fault=replace(scenario.fault, group_timeout=4 * scenario.fault.group_timeout))
        return run

    def _why_not(self, scenario: Scenario, world: int) -> str:
        if hung := next((name for name in self._hangs if name.startswith(scenario.name + "@")), None):
            return f"not tried: it hung in {hung}"
        if len(self._hangs) >= HANGS:
            return f"not tried: it hung in {', '.join(self._hangs)}"
        before = self._by_name[scenario.prerequisite]
        for plainer in (self._under(self._plain), self._under(before)) if scenario.name != self._plain.name else ():
            if world in plainer.fits(self.worlds):
                plain = self._run(plainer, world)
                if isinstance(plain, str) or self._breakage(plain):
                    return f"not tried: {plainer.name}@{world} broke"
        return ""

    def _wrong_at(self, rule: Rule, world: int) -> bool:
        """Whether a world size is known to be wrong already, so that this rule would only say the same again."""
        if rule.number == "2.6" or world == self.primary or world not in self.worlds or not self._builds_on(rule, "2.1"):
            return False
        plain = self.judge("2.6").runs.get(f"{VALUES.name}@{world}")
        return plain is not None and plain["verdict"] != str(Verdict.PASS)

    def _builds_on(self, rule: Rule, number: str) -> bool:
        return number in rule.needs or any(self._builds_on(self._rules[needed], number) for needed in rule.needs)

    def _breakage(self, run: Run) -> FailedRun | None:
        if run.name not in self._breakages:
            found = self._breakages[run.name] = failed_run(run)
            if found and found.kind == "kit":
                raise KitError(found.line)
            if found and found.kind == "target" and run.world >= self.claims.min_world_size:
                raise TargetError(found.line)
        return self._breakages[run.name]

    def _note_broken(self, rule: Rule, run: Run, broken: FailedRun, judgement: Judgement) -> None:
        blamed = self._blamed(run, broken)
        if broken.kind == "node":
            self._note(judgement, run.name, Verdict.NOT_RUN, reason=broken.line)
        elif rule.worlds is WorldSizes.BELOW_MINIMUM and refused_on_every_rank(run):
            self._note(judgement, run.name, Verdict.PASS, reason=broken.line, checks=1)
        elif self._does_not_take(run) and refused_on_every_rank(run) and len(rule.on) > 1 and not self._owns(rule, run):
            return  # said of it by the run's owner; judged on the others
        elif (rule.may_refuse or self._does_not_take(run)) and refused_on_every_rank(run):
            self._note(judgement, run.name, Verdict.NOT_APPLICABLE, reason=f"refused with an error on every rank: {broken.line}", checks=1)
        elif rule.number == blamed or (blamed is None and self._owns(rule, run)):
            judgement.failures.append(Failure(broken.expected, broken.line, broken.cause or self._explain(run, broken), broken.evidence))
            self._note(judgement, run.name, Verdict.FAIL, reason=broken.line)
        else:
            self._note(judgement, run.name, Verdict.NOT_RUN, reason=f"{run.name} broke: {broken.line}")

    def _blamed(self, run: Run, broken: FailedRun) -> str | None:
        """Return the rule that this kind of breaking belongs to, where it reads the run; None where the run's owner is to speak."""
        for rule in self._rules.values():
            if rule.blamed_for == broken.kind and run.scenario.name in {scenario.name for scenario in rule.on}:
                return rule.number
        return None

    def _does_not_take(self, run: Run) -> bool:
        """Whether it says that it does not take what the run gives it."""
        few = any(len(group) < self.claims.min_world_size for group in run.scenario.groups)
        return few or bool(self.claims.dtypes and {spec.dtype for spec in run.scenario.params} - set(self.claims.dtypes))

    def _explain(self, run: Run, broken: FailedRun) -> str:
        """Repeat a run that broke where collectives may be the reason, with those on record: where do ranks disagree?"""
        if (
            broken.kind not in ("hang", "died", "raised")
            or run.world == 1
            or run.scenario.fault.kind != "none"
            or run.scenario.resume.resumes
        ):
            return ""
        scenario = explained(run.scenario)
        try:
            return disagreement(self.source.run(scenario, run.world, self.subject, f"{scenario.name}@{run.world}"))
        except UsageError:
            return ""  # records that were kept without it

    def _ask(self, rule: Rule, records: Run | dict[str, Run]) -> Found | str:
        """Ask a rule; its own exception is the kit's error, never a verdict on the subject."""
        found = Found()
        try:
            rule.check(records, self.claims, found)
        except Exception:
            return traceback.format_exc()
        return found

    def _note_found(self, judgement: Judgement, name: str, found: Found | str) -> None:
        if isinstance(found, str):
            self._note(judgement, name, Verdict.KIT_ERROR, reason=f"the rule itself failed: {found}")
            return
        verdict = found.verdict()
        reason = found.failures[0].actual if found.failures else found.not_applicable or ""
        if verdict is Verdict.FAIL and not judgement.failures:
            judgement.failures = found.failures
        if verdict is Verdict.NOT_RUN:
            reason = "nothing in the records to judge it on"
        said = {"checks": found.checks, "margin": found.margin, "traffic": found.traffic, "notes": found.notes or None}
        self._note(judgement, name, verdict, reason=reason, **said)

    def _note(self, judgement: Judgement, name: str, verdict: Verdict, **said: Any) -> None:
        judgement.runs[name] = {"verdict": str(verdict), **{key: value for key, value in said.items() if value is not None}}
        if verdict > judgement.verdict:
            judgement.verdict, judgement.reason = verdict, f"{name}: {said['reason']}"


def make_control(source: Source, rules: dict[str, Rule], kind: str, worlds: Sequence[int]) -> Engine:
    """Return the engine that judges the reference of a kind."""
    if kind == HOOK:
        return Engine(source, rules, REFERENCE, Claims(), worlds)
    reference = parse_other(kind, KINDS[kind].reference)
    return Engine(source, rules, reference, default_claims(kind, parse_target(str(reference.target), "").kwargs), worlds)


def make_engine(source: Source, rules: dict[str, Rule], subject: SubjectSpec, claims: Claims, worlds: Sequence[int]) -> Engine:
    """Return the engine for a subject, with the reference of its kind as its control."""
    return Engine(source, rules, subject, claims, worlds, make_control(source, rules, subject.kind, worlds))
