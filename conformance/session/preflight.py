"""What can be known of a command line before anything is imported or run."""

import contextlib
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
    if options.claims == AUTO and subject.kind != HOOK:
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


def results_folder(subject: SubjectSpec) -> Path:
    """Return the folder for what a session says of a subject, in the current directory."""
    slug = "".join(char if char.isalnum() or char in "._-" else "_" for char in subject.name)[:120]
    return Path("conformance-results") / slug


def certificate_path(options: Options, subject: SubjectSpec) -> Path:
    """Return where a certificate would be written."""
    return Path(options.certificate) if options.certificate else results_folder(subject) / "certificate.json"


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
    named = {kind: text for kind in KINDS if (text := getattr(options, kind))}
    hooks = [name for name in ("hook", "setup", "state") if getattr(options, name)]
    if not named:
        return parse_subject(options.hook, options.state, options.setup)
    if len(named) > 1 or hooks:
        raise UsageError(f"name one subject: {', '.join(f'--{name}' for name in [*hooks, *named])} do not go together")
    return parse_other(*next(iter(named.items())))
