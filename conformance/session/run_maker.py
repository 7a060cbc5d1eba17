"""The runs of one subject: each is made once, on demand, and so are those of its baselines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from conformance.errors import KitError, TargetError, UsageError
from conformance.judging.collective_order import disagreement
from conformance.judging.misshapen import field_without_value
from conformance.judging.run_failures import FailedRun, failed_run, refused_on_every_rank
from conformance.records.rank_record import IncompleteRecord
from conformance.records.run import Run
from conformance.scenarios.hook import explained
from conformance.scenarios.model import Scenario
from conformance.session.plan import Plan
from conformance.session.run_sources import RunSource
from conformance.subjects.claims import Claims
from conformance.subjects.references import claimed_references
from conformance.subjects.spec import SubjectSpec

MAX_HANGS = 3  # runs that may cost their whole deadline before the rest are not run

Wanted = tuple[Scenario, int]
"""A scenario, adapted to the claims, and a world size."""


@dataclass(frozen=True)
class NotRun:
    """A run that there is none of, and why."""

    reason: str


class NodeLost(Exception):
    """The run of a baseline was cut short; the text names the node."""


class RunMaker:
    """Makes the runs of one subject.

    Args:
        source: where runs come from.
        plan: the plan of the session.
        subject: the subject.
        claims: its claims.
        control: makes the runs of the reference; None for the reference itself.
        scheduled: returns the runs to begin ahead of time, once the plainest one has passed: the
            baseline, or "" for the subject itself, the scenario and the world size.

    Attributes:
        made: the runs so far, by the name of their scenario and their world size.
        explained: by the name of a failed run, its repetition with collectives on record.
        waits_for: called with the name of each run before it is waited for.
    """

    def __init__(
        self,
        source: RunSource,
        plan: Plan,
        subject: SubjectSpec,
        claims: Claims,
        control: "RunMaker | None",
        scheduled: Callable[[], Sequence[tuple[str, Scenario, int]]],
    ) -> None:
        self.made: dict[tuple[str, int], Run | NotRun] = {}
        self.explained: dict[str, Run] = {}
        self._source = source
        self._plan = plan
        self._subject = subject
        self._claims = claims
        self._control = control
        self._scheduled = scheduled
        self._baselines: dict[tuple[str, Scenario], Run] = {}
        self._failures: dict[str, FailedRun | None] = {}
        self._hangs: list[str] = []
        self.waits_for: Callable[[str], object] = _ignore

    @property
    def baselines(self) -> list[Run]:
        """The runs of baselines so far."""
        return list(self._baselines.values())

    def run(self, scenario: Scenario, size: int) -> Run | NotRun:
        """Return the run of a scenario, run once."""
        key = (scenario.name, size)
        if key not in self.made:
            reason = self._reason_not_run(scenario, size)
            if reason is None:
                self.waits_for(f"{scenario.name}@{size}")
            self.made[key] = reason or self._new_run(scenario, size)
            run = self.made[key]
            failed = self.failure_of(run) if isinstance(run, Run) else None
            if failed and failed.kind == "hang":
                self._hangs.append(f"{scenario.name}@{size}")
            if isinstance(run, Run) and failed and _is_broken(run):
                # The other runs of a broken subject may each cost their whole deadline.
                self._source.forget()
            elif key == (self._plan.plainest.name, self._plan.primary):
                self._begin_scheduled()
        return self.made[key]

    def _new_run(self, scenario: Scenario, size: int) -> Run:
        # A group's own timeout can expire too early on a loaded machine: try again with a longer
        # one.
        for _ in range(3):
            noting = self.noting(scenario)
            run = self._source.run(noting, size, self._subject, f"{scenario.name}@{size}")
            reached = all(rank.first("step", step=scenario.fault.step) for rank in run.ranks)
            if not scenario.fault.group_timeout or reached:
                break
            longer = replace(scenario.fault, group_timeout=4 * scenario.fault.group_timeout)
            scenario = replace(scenario, fault=longer)
        return run

    def begin(self, wanted: Sequence[Wanted]) -> None:
        """Begin runs ahead of time."""
        self._source.begin(
            [(self.noting(scenario), size) for scenario, size in wanted], self._subject
        )

    def _begin_scheduled(self) -> None:
        for baseline, scenario, size in self._scheduled():
            if not baseline:
                self.begin([(scenario, size)])
                continue
            scenario = _of_baseline(scenario)
            for prefix, subject in self._baseline_subjects(baseline).items():
                if (f"{prefix}-{scenario.name}@{size}", scenario) not in self._kept(baseline):
                    self._source.begin([(scenario, size)], subject, f"{prefix}-")

    def noting(self, scenario: Scenario) -> Scenario:
        """Return a scenario in which ranks note the coverage of the subject.

        The coverage of a control is of no interest. A hook that is registered exactly as it was
        given runs the code that Python would run.
        """
        if self._control is None or not scenario.observe.hook:
            return scenario
        return replace(scenario, observe=replace(scenario.observe, coverage=True))

    def _reason_not_run(self, scenario: Scenario, size: int) -> NotRun | None:
        hung = next((name for name in self._hangs if name.startswith(f"{scenario.name}@")), None)
        if hung is not None:
            return NotRun(f"not tried: it hung in {hung}")
        if len(self._hangs) >= MAX_HANGS:
            return NotRun(f"not tried: it hung in {', '.join(self._hangs)}")
        for plainer, world in self._plan.prerequisites(scenario, size):
            run = self.run(plainer, world)
            if isinstance(run, NotRun) or self.failure_of(run):
                return NotRun(f"not tried: {plainer.name}@{world} broke")
        return None

    def failure_of(self, run: Run) -> FailedRun | None:
        """Return why a run failed, or None.

        Raises:
            KitError, TargetError: the failure is not a verdict on the subject.
        """
        if run.name not in self._failures:
            failed = failed_run(run)
            if failed and failed.kind == "target" and self._has_run():
                # The target is right: a subject refuses, say, a dtype with a TypeError of its own.
                failed = replace(failed, kind="raised")
            self._failures[run.name] = failed
            if failed and failed.kind == "kit":
                raise KitError(failed.line)
            if failed and failed.kind == "target" and run.world >= self._claims.min_world_size:
                raise TargetError(failed.line)
        return self._failures[run.name]

    def _has_run(self) -> bool:
        """Return whether a run of the subject has come to its end, so that its target is right."""
        runs = [run for run in self.made.values() if isinstance(run, Run)]
        return any(self._failures.get(run.name, run) is None for run in runs)

    def baseline_runs(self, baseline: str, scenario: Scenario, size: int) -> dict[str, Run]:
        """Return the runs that a rule compares the subject's run with, each run once.

        Raises:
            NodeLost: one was cut short.
            TargetError: the claimed reference does not run under these options.
            KitError: vanilla DDP does not run.
        """
        runs_of_baseline = self._kept(baseline)
        scenario = _of_baseline(scenario)
        runs = {}
        for prefix, subject in self._baseline_subjects(baseline).items():
            name = f"{prefix}-{scenario.name}@{size}"
            key = (name, scenario)
            if key not in runs_of_baseline:
                runs_of_baseline[key] = self._source.run(scenario, size, subject, name)
            run = runs_of_baseline[key]
            failed = failed_run(run)
            if failed and failed.kind == "node":
                del runs_of_baseline[key]
                raise NodeLost(failed.line)
            if failed and subject:
                raise TargetError(
                    f"--claims {self._claims}: the claimed reference itself fails in this run, so "
                    f"that the subject cannot be compared with it: {failed.line}"
                )
            if failed:
                raise KitError(f"DDP without a hook does not run {name}: {failed.line}")
            runs[name] = run
        return runs

    def _kept(self, baseline: str) -> dict[tuple[str, Scenario], Run]:
        """Return the dict that keeps the runs of a baseline."""
        # Vanilla DDP is the same for all subjects, so that the control keeps its runs.
        keeper = self._control if baseline == "vanilla" and self._control else self
        return keeper._baselines

    def _baseline_subjects(self, baseline: str) -> dict[str, SubjectSpec | None]:
        """Return the subjects of a baseline, by what the names of their runs begin with."""
        claims = self._claims
        if baseline == "vanilla" and not (
            claims.lossy or claims.fused or claims.sum or claims.scaled
        ):
            return {"vanilla": None}
        if baseline == "like" and claims.has("like"):
            return {f"like_{at}": spec for at, spec in enumerate(claimed_references(claims))}
        return {}

    def vanilla(self, run: Run) -> Run:
        """Return a run of vanilla DDP on the same scenario, for a picture; no rule reads it.

        Raises:
            ConformanceError: there is none.
        """
        return self._source.run(_of_baseline(run.scenario), run.world, None, f"vanilla-{run.name}")

    def explain(self, run: Run, failed: FailedRun) -> str:
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
            again = self._source.run(scenario, run.world, self._subject, name)
        except UsageError:
            return ""  # the replayed records do not hold this run
        # A record that is incomplete explains nothing.
        try:
            cause = disagreement(again) or ""
        except IncompleteRecord:
            return ""
        except (AttributeError, TypeError):
            if field_without_value([again]) is None:
                raise
            return ""
        self.explained[run.name] = again
        return cause


def _is_broken(run: Run) -> bool:
    """Whether a failed run is the subject's defect: no refusal, and no failure that was planned."""
    return run.scenario.fault.kind == "none" and not refused_on_every_rank(run)


def _of_baseline(scenario: Scenario) -> Scenario:
    """Return a scenario for a baseline: the call after backward is the subject's own."""
    return replace(scenario, poststep=False, call="")


def _ignore(_: str) -> None:
    """Show no progress."""
