"""Runs from ranks of this machine, and runs from records that were kept."""

import shutil
from pathlib import Path

from conformance.errors import UsageError
from conformance.pool import Pool
from conformance.record import OUTCOME
from conformance.run import Run, load_run
from conformance.scenario import Scenario
from conformance.subject import REFERENCE, SubjectSpec


class LocalSource:
    """Runs scenarios on a pool; the records are read and let go of."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        """Run it. Raises: KitError."""
        folder = self._pool.run(scenario, world, subject, _folder_name(name, subject))
        try:
            return load_run(folder, scenario, world)
        finally:
            self._pool.discard(folder)


class ReplaySource:
    """Reads the runs that ``--records DIR`` kept.

    Raises:
        UsageError: the folder holds no records.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
    return f"reference-{name}" if subject == REFERENCE else name
