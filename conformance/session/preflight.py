"""What can be known of a command line before anything is imported or run."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from conformance.errors import ProfileError, RequiredProfileError, UsageError
from conformance.hosts.remote.rendezvous import parse_endpoint
from conformance.scenarios.profiles import Profile, requested_profile, require
from conformance.session.options import Options
from conformance.subjects.claims import AUTO, parse_claims
from conformance.subjects.kinds import HOOK, KINDS
from conformance.subjects.spec import SubjectSpec, parse_other, parse_subject


def check(options: Options) -> None:
    """Check all options but ``--rule`` and ``--replay``, which need the rule book and records.

    Raises:
        UsageError: the options cannot be run as written.
        ProfileError: no machine can run the profile.
    """
    if options.attach and options.replay:
        raise UsageError("--attach and --replay do not go together: records are judged without running anything")
    if options.attach:
        parse_endpoint(options.attach)
    subject = subject_of(options)
    if options.claims == AUTO and not KINDS[subject.kind].searches_claims:
        raise UsageError(f"--claims auto proposes claims for hooks; say what this {subject.kind} claims, or leave it out")
    if options.claims and options.claims != AUTO:
        parse_claims(options.claims, subject.kind)
    parse_worlds(options.world_size)
    profile_asked(options)
    require_writable(certificate_path(options, subject))


def profile_asked(options: Options) -> Profile:
    """Return the profile that the options ask for.

    Raises:
        UsageError: they name no profile.
        ProfileError: no machine can run it.
    """
    with required(options):
        asked = requested_profile(options.backend, options.device, options.backend_import)
    if not options.replay:
        require(options.require_profile, asked, final=False)
    return asked


@contextlib.contextmanager
def required(options: Options) -> Iterator[None]:
    """Make it a failure that a profile cannot be run, where ``--require-profile`` says so."""
    try:
        yield
    except ProfileError as error:
        if options.require_profile and not isinstance(error, RequiredProfileError):
            raise RequiredProfileError(f"--require-profile {options.require_profile}: {error}") from error
        raise


def parse_worlds(text: str) -> tuple[int, ...]:
    """Parse ``--world-size``: sizes from 1 to 64, in order.

    Raises:
        UsageError: the text is no list of them.
    """
    try:
        worlds = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"--world-size {text}: not a list of numbers, e.g. 1,2,3,4") from None
    if worlds[0] < 1 or worlds[-1] > 64:
        raise UsageError(f"--world-size {text}: sizes go from 1 to 64")
    return worlds


def results_folder(subject: SubjectSpec, claims: str | None = None) -> Path:
    """Return the folder for the results of a subject with its settings, in the current directory.

    Settings are the arguments of the target, the state, and the claims of the command line. Each combination has a folder of its
    own, so that certifying one does not replace the certificate of another; without any, the folder is named after the target alone.

    Args:
        claims: those of the command line; others are not known before the subject is loaded.
    """
    target, _, arguments = subject.name.partition(",")
    name = _slug(target)[:120]
    given = [text for text in (arguments, subject.state, claims) if text]
    settings = "-".join(given)
    readable = _slug(settings)[:80]
    if settings:
        name += f"-{readable}"
    if readable != settings or len(target) > 120:
        # Different settings may look alike once characters are replaced or cut off.
        whole = json.dumps([subject.name, subject.state, claims])
        name += f"-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return Path("conformance-results") / name


def _slug(text: str) -> str:
    return "".join(char if char.isalnum() or char in "._-" else "_" for char in text)


def certificate_path(options: Options, subject: SubjectSpec) -> Path:
    """Return where a certificate would be written."""
    return Path(options.certificate) if options.certificate else results_folder(subject, options.claims) / "certificate.json"


def set_aside(options: Options) -> list[str]:
    """Rename the certificate and the report of an earlier run to ``*.previous.*``; return a line if there was a certificate.

    A run does this before anything can fail: otherwise the results of the earlier run would pass for its own. Files of others are
    left alone.

    Raises:
        UsageError: a file cannot be renamed.
    """
    # Imported here, since pytest imports this module in every run of an environment that has the kit.
    from conformance.certificates.reader import is_result

    certificate, report = _result_paths(options)
    if report and is_result(report):
        _rename(report)
        _rename(report.with_suffix(".html"))
    if certificate is None or not is_result(certificate):
        return []
    previous = _previous(certificate)
    if previous.exists() and not is_result(previous):
        raise UsageError(f"{certificate}: is of an earlier run and cannot be renamed: {previous} is in the way")
    _rename(certificate)
    return [f"the certificate of an earlier run is now {previous}"]


def _result_paths(options: Options) -> tuple[Path | None, Path | None]:
    """Return the paths of certificate and report, as far as the options name them."""
    try:
        subject = subject_of(options)
    except UsageError:  # check() raises it again
        return (Path(options.certificate) if options.certificate else None), None
    return certificate_path(options, subject), results_folder(subject, options.claims) / "report.json"


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def _rename(path: Path) -> None:
    """Rename a file, if it is there. Raises: UsageError."""
    try:
        path.replace(_previous(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"{path}: is of an earlier run and cannot be renamed ({error.strerror})") from error


def require_writable(path: Path) -> None:
    """Find out before anything runs that the certificate could not be written afterwards.

    Raises:
        UsageError: it could not.
    """
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    reason = ""
    if path.is_dir():
        reason = "it is a folder"
    elif path.exists() and not path.is_file():
        reason = "it is no regular file"
    elif not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        reason = "permission denied"
    elif os.statvfs(folder).f_bavail == 0:
        reason = "no space left"
    else:
        probe = folder / f".conformance-{os.getpid()}"
        try:
            probe.write_bytes(b"\0" * 65536)
        except OSError as error:
            reason = str(error.strerror)
        finally:
            try:
                probe.unlink(missing_ok=True)
            except OSError as error:
                reason = reason or str(error.strerror)
    if reason:
        raise UsageError(f"--certificate {path}: cannot be written ({reason})")


def subject_of(options: Options) -> SubjectSpec:
    """Return what a command line names, whatever kind it is of.

    Raises:
        UsageError: it names none, or several, or one that cannot be parsed.
    """
    named = {kind: text for kind in KINDS if kind != HOOK and (text := getattr(options, kind))}
    hooks = [name for name in ("hook", "setup", "state") if getattr(options, name)]
    if not named:
        return parse_subject(options.hook, options.state, options.setup)
    if len(named) > 1 or hooks:
        raise UsageError(f"name one subject: {', '.join(f'--{name}' for name in [*hooks, *named])} do not go together")
    return parse_other(*next(iter(named.items())))
