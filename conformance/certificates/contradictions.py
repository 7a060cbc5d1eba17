"""Entries of a certificate that contradict each other, or that no session of this kit writes.

Whoever edits a certificate can compute a digest that fits. But most entries follow from others, and
an edit seldom changes all of them. Each function here compares one entry with those that it follows
from, and yields one line for each contradiction. A forgery without contradictions passes: only a
signature proves the author. This module imports no torch.
"""

import datetime
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from conformance.certificates.certificate import advice_lines, coverage_line, limit_lines
from conformance.certificates.reader import CertificateFile, numbered_title
from conformance.certificates.reproduction import reproduce_commands
from conformance.errors import ProfileError, UsageError
from conformance.judging.rule import AT_SCALE
from conformance.judging.verdict import NOT_CLAIMED, Verdict
from conformance.scenarios.profiles import Profile, requested_profile, resolve_profile
from conformance.subjects.claims import Claims, parse_claims
from conformance.subjects.kinds import HOOK, KINDS
from conformance.torch_versions.tested import OLDEST

# The day of the kit's first version.
FIRST_DAY = datetime.datetime(2026, 11, 21, tzinfo=datetime.timezone.utc)
# The clocks of two machines may differ by less than this.
CLOCK_SLACK = datetime.timedelta(days=1)

# The rules that apply under a claim only, with the claim: the field `claimed` of these rules. The
# rule book itself needs torch.
CLAIMED_RULES = {
    "2.11": "min_world_size",
    "10.4": "chained",
    "10.5": "chained",
    "11.2": "checkpointable",
    "11.3": "checkpointable",
    "11.4": "checkpointable",
    "11.5": "holds_back",
    "11.6": "holds_back",
    "11.8": "checkpointable",
    "13.8": "like",
    "13.9": "frees_gradients",
    "13.10": "lossy",
    "13.11": "mixes",
    "13.12": "period",
    "13.13": "unbiased",
    "13.16": "unbiased",
    "13.17": "holds_back",
    "13.18": "unbiased",
    "13.14": "unbiased",
    "13.15": "unbiased",
    "14.12": "like",
    "14.13": "min_world_size",
    "14.20": "like",
    "15.20": "min_world_size",
    "15.43": "averages",
    "16.17": "min_world_size",
    "18.3": "divided",
    "18.14": "rounded",
    "18.16": "feedback",
    "18.18": "min_world_size",
    "19.17": "recomputes",
    "22.4": "lossy",
    "23.6": "fused",
    "23.9": "limits_bytes",
}
# Rules that read their runs to find out whether they are claimed.
_CLAIMED_IN_RUNS: Mapping[str, Callable[[Claims], bool]] = {
    "13.1": lambda claims: claims.holds_back,
    "13.2": lambda claims: claims.lossy == "contraction",
    "13.3": lambda claims: claims.lossy == "unbiased",
    "13.4": lambda claims: claims.warmup > 0,
    "13.5": lambda claims: claims.lossy == "local",
    "13.6": lambda claims: claims.has("fused"),
    "13.7": lambda claims: claims.ratio is not None,
    "16.16": lambda claims: claims.has("find_unused") or claims.has("all_used"),
    "23.3": lambda claims: claims.lossy == "unbiased",
    "23.4": lambda claims: claims.lossy == "unbiased",
    "23.5": lambda claims: claims.lossy == "local",
    "19.18": lambda claims: claims.has("draws_anew") or claims.has("reentrant"),
}

_PASS = str(Verdict.PASS)
_ITSELF = "contradicts itself:"


def contradictions(certificate: CertificateFile) -> Iterator[str]:
    """Yield all contradictions, one line each."""
    yield from _rules_listed_twice(certificate)
    for rule in certificate.rules.values():
        yield from _verdict(rule)
        yield from _margins(rule)
    yield from _summaries(certificate)
    yield from _world_sizes(certificate)
    yield from _date(certificate)
    yield from _torch(certificate)
    yield from _module(certificate)
    yield from _coverage(certificate)
    yield from _digests(certificate)
    yield from _at_scale(certificate)
    yield from _reproduction(certificate)
    try:
        claims = parse_claims(certificate.claims, certificate.kind)
    except UsageError as error:
        yield f"has claims that cannot be read: {error}"
        return
    yield from _claimed_rules(certificate, claims)
    yield from _profile(certificate, claims)
    yield from _command(certificate, claims)


# ---- Rules


def _rules_listed_twice(certificate: CertificateFile) -> Iterator[str]:
    numbers = [rule["rule"] for rule in certificate.body["rules"]]
    if twice := sorted({number for number in numbers if numbers.count(number) > 1}):
        yield f"{_ITSELF} rule {', '.join(twice)} is listed more than once"


def _verdict(rule: Mapping[str, Any]) -> Iterator[str]:
    """Compare a rule's verdict and number of checks with those of its runs."""
    runs = list(rule["runs"].values())
    checks = sum(run.get("checks", 0) for run in runs)
    has = f"{_ITSELF} {numbered_title(rule)} has"
    if rule["checks"] != checks:
        yield f"{has} {rule['checks']} checks, but its runs have {checks}"
    elif runs and rule["verdict"] != _worst(runs):
        yield f"{has} the verdict {rule['verdict']!r}, but its runs have {_worst(runs)!r}"
    elif rule["verdict"] == _PASS and not rule["checks"]:
        yield f"{has} the verdict 'pass', but no checks"
    for name, run in rule["runs"].items():
        least = 1 if run.get("verdict") == _PASS else 0
        if run.get("checks", 0) < least:
            verdict = run.get("verdict")
            yield f"{has} {run.get('checks', 0)} checks in {name}, with the verdict {verdict!r}"


def _worst(runs: list[Mapping[str, Any]]) -> str:
    """Return the worst verdict of a rule's runs."""
    verdicts = [str(run.get("verdict")) for run in runs]
    for verdict in reversed(Verdict):
        if str(verdict) in verdicts:
            return str(verdict)
    return verdicts[0]


def _margins(rule: Mapping[str, Any]) -> Iterator[str]:
    """Compare a rule's margin with those of its runs: it is the largest of them."""
    has = f"{_ITSELF} {numbered_title(rule)} has"
    margins = {name: run["margin"] for name, run in rule["runs"].items() if "margin" in run}
    # Written with `not`, so that NaN is refused too.
    wrong = {name: margin for name, margin in margins.items() if not margin >= 0}
    for name, margin in wrong.items():
        yield f"{has} a margin in {name} that is no fraction of a bound: {margin}"
    largest = max(margins.values(), default=None)
    if not wrong and rule.get("margin") != largest:
        yield f"{has} the margin {rule.get('margin')}, but the largest of its runs is {largest}"


def _summaries(certificate: CertificateFile) -> Iterator[str]:
    """Compare the lists of limits and of advice with the rules that they follow from."""
    entries = certificate.body["rules"]
    for name, expected in (("limits", limit_lines(entries)), ("advice", advice_lines(entries))):
        given = certificate.body[name]
        for line in expected:
            if line not in given:
                yield f"{_ITSELF} missing in its {name}: {line}"
        for line in given:
            if line not in expected:
                yield f"{_ITSELF} in its {name}, but not in its rules: {line}"


def _claimed_rules(certificate: CertificateFile, claims: Claims) -> Iterator[str]:
    """Compare the claims with the rules that apply under a claim only."""
    for number, rule in certificate.rules.items():
        if number in CLAIMED_RULES:
            is_claimed = claims.has(CLAIMED_RULES[number])
        elif number in _CLAIMED_IN_RUNS:
            is_claimed = _CLAIMED_IN_RUNS[number](claims)
        else:
            continue
        reason = str(rule.get("reason", ""))
        if is_claimed and reason.endswith(NOT_CLAIMED):
            yield f"{_ITSELF} {numbered_title(rule)} was not judged, but applies under {claims}"
        if not is_claimed and rule["verdict"] == _PASS:
            yield f"{_ITSELF} {numbered_title(rule)} passed, but does not apply under {claims}"


def _at_scale(certificate: CertificateFile) -> Iterator[str]:
    """Compare the notes on simulated ranks with the runs that they are from."""
    expected = [
        note
        for number, rule in certificate.rules.items()
        if number.partition(".")[0] == AT_SCALE
        for run in rule["runs"].values()
        for note in run.get("notes", ())
    ]
    given = certificate.body.get("at_scale", {}).get("notes", [])
    if given != expected:
        yield f"{_ITSELF} its notes on simulated ranks are not those of its rules"


# ---- Circumstances


def _world_sizes(certificate: CertificateFile) -> Iterator[str]:
    """Compare the world sizes of the profile with those of the runs.

    The scenarios of section 24, and those of sparse and complex gradients, have ranks of their own.
    """
    if others := sorted(certificate.judged_worlds - set(certificate.worlds)):
        sizes = ", ".join(map(str, others))
        yield f"{_ITSELF} it has runs at world size {sizes}, which its profile does not list"


def _date(certificate: CertificateFile) -> Iterator[str]:
    """Refuse a date on which no session can have been."""
    text = certificate.body["date"]
    date = _read_date(text)
    if date is None:
        yield f"has a date that cannot be read: {text!r}"
    elif date > datetime.datetime.now(datetime.timezone.utc) + CLOCK_SLACK:
        yield f"has a date in the future: {text}"
    elif date < FIRST_DAY:
        yield f"has a date before the first version of this kit: {text}"


def _read_date(text: str) -> datetime.datetime | None:
    """Return a date with its time zone, or None if it cannot be read."""
    try:
        date = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return date if date.tzinfo else None


def _torch(certificate: CertificateFile) -> Iterator[str]:
    """Refuse a version of torch that the kit does not run with."""
    text = certificate.body["profile"]["torch"]
    version = re.match(r"(\d{1,4})\.(\d{1,4})", text)
    oldest = ".".join(map(str, OLDEST))
    if not version:
        yield f"has a version of torch that cannot be read: {text!r}"
    elif (int(version[1]), int(version[2])) < OLDEST:
        yield f"has torch {text}, but this kit runs with torch {oldest} or newer"


def _module(certificate: CertificateFile) -> Iterator[str]:
    """Compare the subject's module with its target."""
    module = certificate.body["subject"].get("module")
    if module != certificate.name.partition(":")[0].strip():
        yield f"{_ITSELF} it certifies {certificate.name}, but its module is {module}"


def _profile(certificate: CertificateFile, claims: Claims) -> Iterator[str]:
    """Compare the name of the profile with its backend, its devices and the claims."""
    entries = certificate.body["profile"]
    if not certificate.worlds:
        return  # a missing world size, and reported as that
    try:
        # A module that registers a backend makes names possible that torch does not know.
        imports = entries.get("imports")
        requested = requested_profile(entries["backend"], entries["device"], imports)
        profile = resolve_profile(requested, entries, certificate.worlds)
    except (UsageError, ProfileError) as error:
        yield f"{_ITSELF} it was judged on a profile that no machine runs: {error}"
        return
    name = _recorded_name(profile, claims)
    if certificate.profile != name:
        yield (
            f"{_ITSELF} its profile is called {certificate.profile}, but {profile.where} is the "
            f"profile {name}"
        )
    yield from _machine(certificate, profile)
    if profile.backend == "nccl" and not entries.get("nccl"):
        yield f"{_ITSELF} its profile is {name}, but it names no version of NCCL"
    if not profile.takes(claims.backends, claims.devices):
        yield f"{_ITSELF} it claims {claims}, but its profile is {profile.where}"


def _machine(certificate: CertificateFile, profile: Profile) -> Iterator[str]:
    """Compare the machine with the profile that was run on it."""
    entries = certificate.body["profile"]
    if profile.device == "cuda" and entries["torch"].endswith("+cpu"):
        yield f"{_ITSELF} it was judged on cuda, but torch {entries['torch']} has no CUDA"
    if profile.backend == "gloo" and entries.get("gloo") is False:
        yield f"{_ITSELF} it was judged over gloo, but its torch was built without gloo"
    names = entries.get("names")
    # On several machines there may be more GPUs than hosts, and only GPUs with a host count.
    if names is not None and len(names) < entries.get("devices", 0):
        yield f"{_ITSELF} it has {entries['devices']} devices, but {len(names)} names of devices"
    nodes = entries.get("nodes", ())
    largest = max(certificate.worlds)
    slots = sum(node["slots"] for node in nodes)
    if nodes and slots < largest:
        yield f"{_ITSELF} its nodes run {slots} ranks, but its largest world size is {largest}"
    if dict(profile.environment) != entries.get("environment", {}):
        yield f"{_ITSELF} its profile sets other variables than {profile.where} needs"
    environment = certificate.body.get("environment")
    if environment is not None and not {*dict(profile.environment)} <= {*environment}:
        yield f"{_ITSELF} its environment lacks variables that its profile sets"


def _recorded_name(profile: Profile, claims: Claims) -> str:
    return profile.display_name(claims.chained and not profile.ordered)


# ---- Coverage


def _coverage(certificate: CertificateFile) -> Iterator[str]:
    """Compare the counts and the named branches of the coverage, and its probes with the runs."""
    coverage = certificate.body.get("coverage")
    if not coverage or not coverage["measured"]:
        return
    for file in coverage["files"]:
        for part, whole in (("lines_ran", "lines"), ("branches_taken", "branches")):
            if not 0 <= file[part] <= file[whole]:
                yield f"{_ITSELF} {file['file']} has {file[part]} {part} of {file[whole]} {whole}"
    names = {file["file"] for file in coverage["files"]}
    missing = (*coverage["untaken"], *coverage["never_called"])
    for one in missing:
        if one["file"] not in names:
            yield f"{_ITSELF} its coverage names {one['file']}, which is not among its files"
    if coverage.get("required") and (missing or coverage.get("function_not_measured")):
        yield f"{_ITSELF} it requires coverage, but {coverage_line(coverage)}"
    maker = KINDS[certificate.kind].probes
    probe_rule = certificate.rules.get(maker.rule) if maker else None
    if maker and probe_rule is not None:
        wanted = {run for one in coverage["probes"] for run in one["runs"]}
        if wanted != set(probe_rule["runs"]):
            yield f"{_ITSELF} its coverage and rule {maker.rule} have different runs"


def _digests(certificate: CertificateFile) -> Iterator[str]:
    """Compare the digests of the subject's modules with those of the files whose lines ran."""
    coverage = certificate.body.get("coverage")
    if not coverage or not coverage["measured"]:
        return
    for file in coverage["files"]:
        module = file["file"].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        digest = certificate.sources.get(module)
        if digest is not None and digest != file["sha256"]:
            yield f"{_ITSELF} the {file['file']} that ran is not the file of its module {module}"


# ---- The command line


def _reproduction(certificate: CertificateFile) -> Iterator[str]:
    """Compare the commands that repeat the certification with the entries they follow from."""
    given = certificate.body.get("reproduce")
    if given is not None and given != reproduce_commands(certificate.body):
        yield f"{_ITSELF} the commands that reproduce it are of another run"
    steps = certificate.body.get("steps", 0)
    requested = certificate.body.get("requested_steps", 0)
    if steps < requested:
        yield f"{_ITSELF} its long run has {steps} steps, but {requested} were requested"


def _command(certificate: CertificateFile, claims: Claims) -> Iterator[str]:
    """Compare the command line with the subject, the claims and the profile."""
    options = _options(certificate.body["command"])
    if options is None:
        yield f"has a command line that cannot be read: {certificate.body['command']!r}"
        return
    if "rule" in options:
        yield f"{_ITSELF} its command line selects rules: --rule {options['rule']}"
    for name, named in _subject_options(certificate).items():
        given = options.get(name)
        if given != named:
            yield (
                f"{_ITSELF} its command line has --{name} {given or '(none)'}, but its subject has "
                f"{named or 'none'}"
            )
    yield from _claims_of_command(certificate, claims, options.get("claims"))
    yield from _profile_of_command(certificate, options)


def _options(command: str) -> dict[str, str] | None:
    """Return the options of a command line by name, or None if it cannot be read.

    ``Options.command`` writes each option as two words.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    names = words[::2]
    if len(words) % 2 or not all(name.startswith("--") for name in names):
        return None
    values = zip(names, words[1::2], strict=True)
    return {name.removeprefix("--"): value for name, value in values}


def _subject_options(certificate: CertificateFile) -> dict[str, str | None]:
    """Return the value of each option that can name a subject; None if it was not given."""
    subject = certificate.body["subject"]
    options = dict.fromkeys((*KINDS, "setup", "state"))
    for name in (HOOK, "setup", "state"):
        options[name] = subject.get(name)
    if certificate.kind != HOOK:
        options[certificate.kind] = subject.get("target")
    return options


def _claims_of_command(
    certificate: CertificateFile, claims: Claims, given: str | None
) -> Iterator[str]:
    if given is None:
        if certificate.body["claims"].get("declared_by") == "--claims":
            yield f"{_ITSELF} its claims are from --claims, which its command line does not have"
        return
    try:
        same = parse_claims(given, certificate.kind) == claims
    except UsageError:
        same = False
    if not same:
        yield f"{_ITSELF} its command line has --claims {given}, but its claims are {claims}"


def _profile_of_command(certificate: CertificateFile, options: Mapping[str, str]) -> Iterator[str]:
    profile = certificate.body["profile"]
    backend = options.get("backend", Profile.backend)
    device = options.get("device", profile["device"])
    if (backend, device) != (profile["backend"], profile["device"]):
        yield (
            f"{_ITSELF} its command line selects {backend} on {device}, but its profile has "
            f"{profile['backend']} on {profile['device']}"
        )
