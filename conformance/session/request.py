"""A request: a command line parsed once, before anything is imported or run. Imports no torch.

    Options (text)  ->  read_request  ->  Request (parsed)  ->  Session

A request that replays records takes its subject, profile and world sizes from the records.
"""

import contextlib
import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.certificates.versions import upgraded
from conformance.errors import ProfileError, RequiredProfileError, UsageError
from conformance.hosts.remote.rendezvous import parse_endpoint
from conformance.scenarios.draws import LARGEST_SEED
from conformance.scenarios.long_runs import FEWEST_ROUNDS
from conformance.scenarios.profiles import (
    Profile,
    only_device,
    recorded_profile,
    requested_profile,
    require,
    require_known_profile,
)
from conformance.session.options import Options, flag
from conformance.session.results import ResultPaths, require_writable, result_paths, set_aside
from conformance.subjects.claims import AUTO, Claims, parse_claims
from conformance.subjects.kinds import HOOK, KINDS
from conformance.subjects.spec import SubjectSpec, parse_other, parse_subject

SESSION = "session.json"
_FILE_TARGET = re.compile(r"(?P<file>[^:,]+)(?::(?P<rest>.*))?", re.DOTALL)
LARGEST_WORLD = 64
MOST_STEPS = 10_000_000


@dataclass(frozen=True)
class Request:
    """A command line that can be run as written.

    Attributes:
        options: the command line as text; of a replay, with the values of the records.
        subject: the judged subject.
        claims: the claims of the command line; None if there are none, or if they are searched for.
        searches_claims: ``--claims auto``: propose claims, and certify nothing.
        world_sizes: in order.
        profile: the requested profile; of a replay, the recorded one.
        recorded: the header of the replayed session, or None.
        paths: the files to write.
        seed: the seed that scenarios are drawn from.
        steps: the number of steps that a long run has at least; 0 for the drawn number.
        notes: lines for the reader about files that were set aside.
    """

    options: Options
    subject: SubjectSpec
    claims: Claims | None
    searches_claims: bool
    world_sizes: tuple[int, ...]
    profile: Profile
    recorded: Mapping[str, Any] | None
    paths: ResultPaths
    seed: int
    steps: int = 0
    notes: tuple[str, ...] = ()


def prepare_request(options: Options, *, runs: bool = True, results: Path | None = None) -> Request:
    """Set the results of an earlier run aside, then read the request.

    Args:
        options: the command line.
        results: the folder for the certificate and the reports; None for the usual one.
        runs: False if nothing will be judged, as with ``--collect-only``; then no file is touched.

    Raises:
        UsageError: the options cannot be run as written.
        ProfileError: no machine can run the profile.
    """
    if results is None:
        notes = set_results_aside(options) if runs else []
        return replace(read_request(options), notes=tuple(notes))
    certificate = Path(options.certificate) if options.certificate else None
    paths = ResultPaths(certificate or results / "certificate.json", results)
    notes = set_aside(paths) if runs else []
    require_writable(paths.certificate)
    return replace(read_request(options), paths=paths, notes=tuple(notes))


def read_request(options: Options) -> Request:
    """Return the request of a command line, which may replay records.

    Raises:
        UsageError: the options cannot be run as written.
        ProfileError: no machine can run the profile.
    """
    if not options.replay or options.attach:
        return parse_request(options)
    recorded = _read_session(Path(options.replay))
    return parse_request(_with_recorded(options, recorded), recorded)


def set_results_aside(options: Options) -> list[str]:
    """Set aside the files of an earlier run, as far as the options name them; return lines for the
    reader.

    Raises:
        UsageError: a file cannot be renamed.
    """
    try:
        if options.replay and not options.attach:
            options = _with_recorded(options, _read_session(Path(options.replay)))
        paths = result_paths(named_subject(options), options.claims, options.certificate)
    except UsageError:
        # read_request raises it again; the path of the certificate may be known all the same.
        if not options.certificate:
            return []
        certificate = Path(options.certificate)
        paths = ResultPaths(certificate, certificate.parent)
    return set_aside(paths)


def parse_request(options: Options, recorded: Mapping[str, Any] | None = None) -> Request:
    """Parse all options but ``--rule``, which needs the rule book.

    Args:
        options: the command line.
        recorded: the header of the session that is replayed, or None.

    Raises:
        UsageError: the options cannot be run as written.
        ProfileError: no machine can run the profile.
    """
    if options.attach and options.replay:
        raise UsageError("--attach and --replay do not go together: a replay runs nothing")
    if options.attach:
        parse_endpoint(options.attach)
    subject = named_subject(options)
    kind = KINDS[subject.kind]
    searches_claims = options.claims == AUTO
    if searches_claims and not kind.searches_claims:
        raise UsageError(
            "--claims auto proposes claims for hooks only; name the claims of this "
            f"{subject.kind}, or leave --claims out"
        )
    claims = None
    if options.claims and not searches_claims:
        claims = parse_claims(options.claims, subject.kind)
    world_sizes = parse_world_sizes(options.world_size)
    for name in ("deadline", "attach_wait"):
        _require_duration(name, getattr(options, name))
    profile = _profile(options, recorded)
    paths = result_paths(subject, options.claims, options.certificate)
    require_writable(paths.certificate)
    return Request(
        options,
        subject,
        claims,
        searches_claims,
        world_sizes,
        profile,
        recorded,
        paths,
        _seed(options),
        _steps(options, subject),
    )


def named_subject(options: Options) -> SubjectSpec:
    """Return the subject that a command line names, of any kind.

    Raises:
        UsageError: it names none or several, or one that cannot be parsed.
    """
    for name in (*options.named_subjects, "state"):
        _require_module(flag(name), getattr(options, name))
    others = [kind for kind in KINDS if kind != HOOK and getattr(options, kind)]
    hooks = [name for name in (HOOK, "setup", "state") if getattr(options, name)]
    if not others:
        return parse_subject(options.hook, options.state, options.setup)
    if len(others) > 1 or hooks:
        given = ", ".join(f"--{name}" for name in [*hooks, *others])
        raise UsageError(f"name one subject: {given} do not go together")
    return parse_other(others[0], getattr(options, others[0]))


def _require_module(option: str, text: str | None) -> None:
    """Refuse a target that names a file, and show the name of its module."""
    match = _FILE_TARGET.fullmatch(text or "")
    if not match:
        return
    path = Path(match["file"])
    # A module may be called py: mypkg.py is then its name, unless there is such a file.
    is_file = path.suffix == ".py" and (len(path.parts) > 1 or path.exists())
    if is_file:
        target = f"{path.stem}:{match['rest'] or 'attribute'}"
        raise UsageError(
            f"{option} {text}: name the module, not the file: {option} {target}, from the folder "
            "of the file"
        )


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Parse ``--world-size``: sizes from 1 to 64, in order.

    Raises:
        UsageError: the text is not a list of such sizes.
    """
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"--world-size {text}: not a list of numbers, e.g. 1,2,3,4") from None
    if sizes[0] < 1 or sizes[-1] > LARGEST_WORLD:
        raise UsageError(f"--world-size {text}: sizes go from 1 to {LARGEST_WORLD}")
    return sizes


@contextlib.contextmanager
def profile_is_required(options: Options) -> Iterator[None]:
    """Under ``--require-profile``, a profile that cannot be run is a failure (exit code 1 instead
    of 8).
    """
    try:
        yield
    except ProfileError as error:
        if options.require_profile and not isinstance(error, RequiredProfileError):
            raise RequiredProfileError(
                f"--require-profile {options.require_profile}: {error}"
            ) from error
        raise


def _require_duration(name: str, seconds: float) -> None:
    """Refuse a number of seconds that no wait can take: zero, negative, not finite, above a day."""
    if not (math.isfinite(seconds) and 0 < seconds <= 86_400):
        option = f"--{name.replace('_', '-')}"
        raise UsageError(
            f"{option} {seconds:g} is out of range: give a number of seconds above 0 and up to "
            "86400"
        )


def _seed(options: Options) -> int:
    """Return the seed of the command line, or a new one."""
    if options.seed is None:
        return secrets.randbelow(LARGEST_SEED + 1)
    if not 0 <= options.seed <= LARGEST_SEED:
        raise UsageError(
            f"--seed {options.seed} is out of range: give a number from 0 to {LARGEST_SEED}"
        )
    return options.seed


def _steps(options: Options, subject: SubjectSpec) -> int:
    """Return the smallest number of steps of a long run; 0 if none is given."""
    if options.steps is None:
        return 0
    if subject.kind != HOOK:
        raise UsageError(
            f"--steps {options.steps}: only the long run of a hook can be lengthened; leave "
            f"--steps out for {KINDS[subject.kind].with_article}"
        )
    if not FEWEST_ROUNDS <= options.steps <= MOST_STEPS:
        raise UsageError(
            f"--steps {options.steps} is out of range: give a number from {FEWEST_ROUNDS} to "
            f"{MOST_STEPS}; the long run has that many steps or more"
        )
    return options.steps


def _profile(options: Options, recorded: Mapping[str, Any] | None) -> Profile:
    if recorded:
        return recorded_profile(recorded["profile"])
    if options.require_profile and not options.backend_import:
        require_known_profile(options.require_profile)
    with profile_is_required(options):
        try:
            profile = requested_profile(options.backend, options.device, options.backend_import)
        except ProfileError as error:
            device = only_device(options.backend)
            raise ProfileError(f"{error}; leave --device out, or pass --device {device}") from error
    require(options.require_profile, profile, final=False)
    return profile


def _read_session(folder: Path) -> dict[str, Any]:
    """Return the header of the session whose records are in a folder.

    Raises:
        UsageError: there is no readable header.
    """
    try:
        # Headers of older kits have the keys of version 1.
        header = upgraded(json.loads((folder / SESSION).read_text()))
        for key in ("subject", "profile", "claims", "date"):
            header[key]
        header["claims"]["text"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--replay {folder}: no readable {SESSION} in it; --records DIR writes one"
        ) from error
    return header


def _with_recorded(options: Options, recorded: Mapping[str, Any]) -> Options:
    """Return the options with the subject, claims, profile and world sizes of the records."""
    subject = recorded["subject"]
    profile = recorded["profile"]
    names = {name: subject[name] for name in (HOOK, "state", "setup")}
    if subject.get("target"):
        names[subject["kind"]] = subject["target"]
    if recorded["claims"].get("declared_by") == "--claims":
        names["claims"] = options.claims or recorded["claims"]["text"]
    return replace(
        options,
        **names,
        world_size=",".join(map(str, profile["world_sizes"])),
        backend=profile["backend"],
        device=profile["device"],
        backend_import=None,
        # Records of a kit without seeds were made from scenarios with fixed numbers.
        seed=recorded.get("seed", 0),
        steps=recorded.get("requested_steps"),
    )
