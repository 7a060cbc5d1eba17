"""Sources of runs: the ranks of this session, or records that were kept."""

import contextlib
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from conformance.errors import UsageError
from conformance.hosts.ranks_protocol import Ranks
from conformance.judging.run_failures import is_tried_again
from conformance.records.files import OUTCOME
from conformance.records.run import Run, load_run
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile, SizeLimit
from conformance.subjects.kinds import KINDS
from conformance.subjects.spec import SubjectSpec

TRIES = 3  # of a run that a busy machine may have ended


class RunSource:
    """A source of runs.

    Attributes:
        profile: the profile of all runs.
        seed: the seed that scenarios are drawn from (``scenarios/draws.py``).
        steps: the number of steps that a long run has at least.
        limit: the largest number of ranks that a scenario may bring itself; None for any.
    """

    profile: Profile = GLOO_CPU
    seed: int = 0
    steps: int = 0
    limit: SizeLimit | None = None

    @property
    def capacity(self) -> int | None:
        """The largest world size that can be run; None if there is no limit."""
        return None

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        """Return a run."""
        raise NotImplementedError

    def begin(
        self, runs: Iterable[tuple[Scenario, int]], subject: SubjectSpec | None, prefix: str = ""
    ) -> None:
        """Take note of runs that will be needed unless one of them fails; they may begin now.

        Args:
            runs: scenarios and world sizes.
            subject: the subject; None to run without any.
            prefix: what the name of a run begins with, before that of its scenario.
        """

    def forget(self) -> None:
        """Cancel the runs that have not begun."""


class LocalSource(RunSource):
    """Runs scenarios on a pool; the records are read and removed, or kept in a folder.

    Args:
        pool: the source of ranks.
        keep: the folder for ``--records``.
        profile: the profile that ranks run in.
        seed: the seed that scenarios are drawn from.
        steps: the number of steps that a long run has at least.
        limit: the largest number of ranks that a scenario may bring itself; None for any.
    """

    def __init__(
        self,
        pool: Ranks,
        keep: Path | None = None,
        profile: Profile = GLOO_CPU,
        seed: int = 0,
        steps: int = 0,
        limit: SizeLimit | None = None,
    ) -> None:
        self.profile = profile
        self.seed = seed
        self.steps = steps
        self.limit = limit
        self._pool = pool
        self._keep = keep
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: dict[str, Future[Run]] = {}
        self._turns = _Turns()
        # Folders of runs that others resume from; they go with the pool.
        self._saved: dict[str, Path] = {}

    @property
    def capacity(self) -> int | None:
        return self._pool.capacity

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        """Run a scenario, or wait for it if it has begun. Raises: KitError."""
        begun = self._ahead.pop(_folder_name(name, subject), None)
        if begun and not begun.cancel():
            return begun.result()
        return self._run(scenario, world, subject, _folder_name(name, subject))

    def begin(
        self, runs: Iterable[tuple[Scenario, int]], subject: SubjectSpec | None, prefix: str = ""
    ) -> None:
        """Begin runs in their order, as many at a time as the pool has lanes."""
        self._threads = self._threads or ThreadPoolExecutor(self._pool.lanes)
        for scenario, world in runs:
            name = _folder_name(f"{prefix}{scenario.name}@{world}", subject)
            self._ahead[name] = self._threads.submit(self._run, scenario, world, subject, name)

    def forget(self) -> None:
        """Cancel the runs that still wait for a lane; they run when they are needed."""
        self._ahead = {name: future for name, future in self._ahead.items() if not future.cancel()}

    def _run(
        self, scenario: Scenario, world: int, subject: SubjectSpec | None, folder_name: str
    ) -> Run:
        if scenario.resume.resumes:
            saved_in = str(self._saved_for(scenario, folder_name))
            scenario = replace(scenario, resume=replace(scenario.resume, saved_in=saved_in))
        # A rank that ends in the middle of a collective of NCCL can take the other processes of a
        # shared GPU with it.
        is_alone = scenario.profile.device != "cpu" and scenario.fault.kind != "none"
        with self._turns.alone() if is_alone else self._turns.beside_others():
            for _ in range(TRIES):
                run = self._try(scenario, world, subject, folder_name)
                if not is_tried_again(run):
                    break
        return run

    def _try(
        self, scenario: Scenario, world: int, subject: SubjectSpec | None, folder_name: str
    ) -> Run:
        folder = self._pool.run(scenario, world, subject, folder_name)
        try:
            return load_run(folder, scenario, world)
        finally:
            if self._keep:
                _keep(folder, self._keep)
            self._remove(folder, folder_name, scenario)

    def _saved_for(self, scenario: Scenario, folder_name: str) -> Path:
        """Return the folder of the run that a run continues, which may have other ranks."""
        earlier = folder_name.replace(f"{scenario.name}@", f"{scenario.prerequisite}@")
        if earlier in self._saved:
            return self._saved[earlier]
        prefix = earlier.rpartition("@")[0] + "@"
        return next(folder for name, folder in self._saved.items() if name.startswith(prefix))

    def _remove(self, folder: Path, folder_name: str, scenario: Scenario) -> None:
        """Remove a run's folder; if others resume from it, keep it and remove its predecessor."""
        done: Path | None = folder
        if scenario.resume.saves_at and not scenario.resume.resumes:
            done = self._saved.get(folder_name)
            self._saved[folder_name] = folder
        if done is not None:
            shutil.rmtree(done, ignore_errors=True)


class _Turns:
    """Lets a run wait until no other goes on, and others wait until it is over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._going_on = 0
        self._waiting_to_be_alone = 0

    @contextlib.contextmanager
    def beside_others(self) -> Iterator[None]:
        """Go on beside others, unless one of them is alone or waits to be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_to_be_alone)
            self._going_on += 1
        try:
            yield
        finally:
            self._end()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Go on when no other does; others wait."""
        with self._changed:
            self._waiting_to_be_alone += 1
            self._changed.wait_for(lambda: not self._going_on)
            self._going_on += 1
        try:
            yield
        finally:
            self._end(was_alone=True)

    def _end(self, *, was_alone: bool = False) -> None:
        with self._changed:
            self._going_on -= 1
            self._waiting_to_be_alone -= was_alone
            self._changed.notify_all()


class ReplaySource(RunSource):
    """Reads the runs that ``--records DIR`` kept.

    Args:
        folder: DIR.
        profile: the profile that they were made in.
        seed: the seed that their scenarios were drawn from.
        steps: the number of steps that a long run has at least.
        limit: the largest number of ranks that a scenario brought itself; None for any.

    Raises:
        UsageError: the folder holds no records.
    """

    def __init__(
        self,
        folder: Path,
        profile: Profile = GLOO_CPU,
        seed: int = 0,
        steps: int = 0,
        limit: SizeLimit | None = None,
    ) -> None:
        self.profile = profile
        self.seed = seed
        self.steps = steps
        self.limit = limit
        self._folder = folder
        if not any(folder.glob(f"*/{OUTCOME}")):
            raise UsageError(f"--replay {folder}: no records in it; --records DIR writes them")

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        """Read a run. Raises: UsageError, if it was not kept."""
        folder = self._folder / _folder_name(name, subject)
        if not (folder / OUTCOME).exists():
            raise UsageError(
                f"--replay {self._folder}: no record of {folder.name}; was it recorded with the "
                "same "
                "world sizes and claims?"
            )
        return load_run(folder, scenario, world)


def _keep(folder: Path, records: Path) -> None:
    """Copy a run's records, without the files that only its processes needed."""
    with contextlib.suppress(OSError):
        left_out = shutil.ignore_patterns("tmp", "ask", "stacks.txt", "flight.json", "store")
        shutil.copytree(folder, records / folder.name, dirs_exist_ok=True, ignore=left_out)


def new_records_folder(folder: Path) -> Path:
    """Create the folder for ``--records``; records of an earlier run in it are replaced.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for outcome in folder.glob(f"*/{OUTCOME}"):
            shutil.rmtree(outcome.parent)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise UsageError(f"--records {folder}: {error.strerror}") from error
    return folder


def _folder_name(name: str, subject: SubjectSpec | None) -> str:
    references = [kind.reference for kind in KINDS.values()]
    return (
        f"reference-{name}"
        if subject and subject.name in references and not subject.state
        else name
    )
