"""The files that a run writes, and the files of an earlier run. Imports no torch."""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import UsageError
from conformance.subjects.spec import SubjectSpec

RESULTS = Path("conformance-results")
# Different settings may look alike in a folder's name once characters are replaced or cut off.
_LONGEST_TARGET = 120
_LONGEST_SETTINGS = 80


@dataclass(frozen=True)
class ResultPaths:
    """The files that a run writes.

    Attributes:
        certificate: the certificate; its default place is in ``folder``.
        folder: the folder of the reports.
    """

    certificate: Path
    folder: Path

    @property
    def report(self) -> Path:
        return self.folder / "report.json"


def result_paths(subject: SubjectSpec, claims: str | None, certificate: str | None) -> ResultPaths:
    """Return the files of a run.

    Args:
        subject: the judged subject.
        claims: the claims of the command line; claims made elsewhere are not known before loading.
        certificate: ``--certificate``, or None.
    """
    folder = results_folder(subject, claims)
    return ResultPaths(Path(certificate) if certificate else folder / "certificate.json", folder)


def results_folder(subject: SubjectSpec, claims: str | None = None) -> Path:
    """Return the folder for the results of a subject with its settings, in the current directory.

    The settings are the arguments of the target, the state, and the claims of the command line.
    Each combination has a folder of its own, so that certifying one does not replace the
    certificate of another. Without settings the folder is named after the target alone.
    """
    target, _, arguments = subject.name.partition(",")
    name = _slug(target)[:_LONGEST_TARGET]
    settings = "-".join(text for text in (arguments, subject.state, claims) if text)
    readable = _slug(settings)[:_LONGEST_SETTINGS]
    if settings:
        name += f"-{readable}"
    if readable != settings or len(target) > _LONGEST_TARGET:
        whole = json.dumps([subject.name, subject.state, claims])
        name += f"-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return RESULTS / name


def set_aside(paths: ResultPaths) -> list[str]:
    """Rename the certificate and the report of an earlier run to ``*.previous.*``.

    A run does this before anything can fail: otherwise the results of the earlier run would pass
    for its own. Files that the kit did not write are left alone. Returns a line for the reader if
    there was a certificate.

    Raises:
        UsageError: a file cannot be renamed.
    """
    if _is_result(paths.report):
        _rename(paths.report)
        _rename(paths.report.with_suffix(".html"))
    certificate = paths.certificate
    if not _is_result(certificate):
        return []
    previous = _previous(certificate)
    if previous.exists() and not _is_result(previous):
        raise UsageError(
            f"{certificate}: is of an earlier run and cannot be renamed: {previous} is in the way"
        )
    _rename(certificate)
    return [f"the certificate of an earlier run is now {previous}"]


def require_writable(path: Path) -> None:
    """Find out before anything runs whether the certificate could be written afterwards.

    Raises:
        UsageError: it could not.
    """
    reason = _reason_not_writable(path)
    if reason is not None:
        raise UsageError(f"--certificate {path}: {reason}; choose another path with --certificate")


def _reason_not_writable(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "cannot be written (it is a folder)"
        if path.exists() and not path.is_file():
            return "cannot be written (it is no regular file)"
        if path.exists() and not os.access(path, os.W_OK):
            return "cannot be written (permission denied)"
        folder = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    if not folder.is_dir():
        return f"cannot be written ({folder} is not a folder)"
    try:
        _write_probe(folder, path)
    except OSError as error:
        # The file that is tried has the name of the certificate in its own; a folder has not.
        is_file = path.name in str(error.filename)
        if folder != path.absolute().parent and not is_file:
            return f"the folder {path.parent} cannot be made ({error.strerror})"
        return f"cannot be written (in {folder}: {error.strerror})"
    space = os.statvfs(folder)
    # Some file systems do not count their space, and report 0 of 0 blocks.
    if space.f_blocks and space.f_bavail == 0:
        return "cannot be written (no space left)"
    return None


def _write_probe(folder: Path, path: Path) -> None:
    """Create the missing folders of a path and a file of its name, below a folder that exists.

    All of it happens in a temporary folder: runs that start at the same time may share the missing
    folders, and must not remove each other's.

    Raises:
        OSError: a folder or the file cannot be created.
    """
    missing = path.absolute().relative_to(folder).parent
    with tempfile.TemporaryDirectory(prefix=".conformance-", dir=folder) as temporary:
        place = Path(temporary) / missing
        place.mkdir(parents=True, exist_ok=True)
        # The name of the file that is written before it is renamed (write_json).
        probe = place / f".{path.name}.{os.getpid()}"
        probe.write_bytes(b"\0" * 65536)


def _is_result(path: Path) -> bool:
    # Imported here, since pytest imports this module in every run of an environment that has the
    # kit.
    from conformance.certificates.reader import is_result

    try:
        return is_result(path)
    except OSError:
        # Not even its status can be read; require_writable reports the reason.
        return False


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def _rename(path: Path) -> None:
    try:
        path.replace(_previous(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(
            f"{path}: is of an earlier run and cannot be renamed ({error.strerror})"
        ) from error


def _slug(text: str) -> str:
    return "".join(char if char.isalnum() or char in "._-" else "_" for char in text)
