"""Runs from ranks of this machine, and runs from records that were kept."""

import contextlib
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from conformance.errors import UsageError
from conformance.hosts.ranks_protocol import Ranks
from conformance.records.files import OUTCOME
from conformance.records.run import Run, load_run
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.session.engine import Source
from conformance.subjects.kinds import KINDS
from conformance.subjects.spec import SubjectSpec


class LocalSource(Source):
    """Runs scenarios on a pool; the records are read and let go of, or kept in a folder.

    Args:
        pool: where ranks come from.
        keep: the folder for ``--records``.
        profile: where ranks run.
    """

    def __init__(self, pool: Ranks, keep: Path | None = None, profile: Profile = GLOO_CPU) -> None:
        self._pool, self._keep, self.profile = pool, keep, profile
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: dict[str, Future[Run]] = {}
        self._saved: dict[str, Path] = {}  # folders of runs that others resume from; they go with the pool

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        """Run it, or wait for it where it was begun ahead. Raises: KitError."""
        begun = self._ahead.pop(_folder_name(name, subject), None)
        if begun and not begun.cancel():
            return begun.result()
        return self._run(scenario, world, subject, _folder_name(name, subject))

    def begin(self, runs: Iterable[tuple[Scenario, int]], subject: SubjectSpec | None) -> None:
        """Begin runs that will be asked for, in their order, as many at a time as the pool has lanes."""
        self._threads = self._threads or ThreadPoolExecutor(self._pool.lanes)
        for scenario, world in runs:
            name = _folder_name(f"{scenario.name}@{world}", subject)
            self._ahead[name] = self._threads.submit(self._run, scenario, world, subject, name)

    def forget(self) -> None:
        """Let go of what waits for a lane still: it is run when it is asked for."""
        self._ahead = {name: future for name, future in self._ahead.items() if not future.cancel()}

    def _run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, folder_name: str) -> Run:
        if scenario.resume.resumes:
            before = self._saved[folder_name.replace(f"{scenario.name}@", f"{scenario.prerequisite}@")]
            scenario = replace(scenario, resume=replace(scenario.resume, saved_in=str(before)))
        folder = self._pool.run(scenario, world, subject, folder_name)
        try:
            return load_run(folder, scenario, world)
        finally:
            if self._keep:
                _keep(folder, self._keep)
            done = folder
            if scenario.resume.saves_at and not scenario.resume.resumes:
                done, self._saved[folder_name] = self._saved.get(folder_name, Path()), folder
            if done != Path():
                shutil.rmtree(done, ignore_errors=True)


class ReplaySource(Source):
    """Reads the runs that ``--records DIR`` kept.

    Args:
        folder: DIR.
        profile: where they were run.

    Raises:
        UsageError: the folder holds no records.
    """

    def __init__(self, folder: Path, profile: Profile = GLOO_CPU) -> None:
        self._folder, self.profile = folder, profile
        if not any(folder.glob(f"*/{OUTCOME}")):
            raise UsageError(f"--replay {folder}: there are no records; --records DIR writes them")

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        """Read it. Raises: UsageError, when it was not kept."""
        folder = self._folder / _folder_name(name, subject)
        if not (folder / OUTCOME).exists():
            raise UsageError(
                f"--replay {self._folder}: there is no record of {folder.name}; was it recorded with the same world sizes and claims?"
            )
        return load_run(folder, scenario, world)


def _keep(folder: Path, records: Path) -> None:
    """Copy a run's records; not what only its processes needed."""
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
    return f"reference-{name}" if subject and subject.name in references and not subject.state else name
