"""The gate's comparison of a certificate with its baseline.

It compares two bodies, reads no file and imports no torch. A margin is an error as a fraction of
its bound, so that a rule fails at 1. Margins are compared run by run. A factor between two tiny
margins has no meaning: 0.01 is ten times 0.001, and no reason to refuse. A margin below
``margin_floor`` therefore counts as the floor, and a result that was exact to the bit may use up to
``margin_factor * margin_floor`` of its bound before it is refused. Traffic is the bytes sent as a
share of the bytes without compression; ``traffic_factor`` leaves room for a compressor whose
choices depend on roundings, and so on the machine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.certificates.reader import CertificateFile, numbered_title
from conformance.judging.verdict import Verdict

MARGIN_FACTOR = 2.0
MARGIN_FLOOR = 0.05
TRAFFIC_FACTOR = 1.01

Entry = Mapping[str, Any]  # a rule in a certificate, or one of its runs

_PASS = str(Verdict.PASS)
_SHARES = {"largest": "in the step that sends most", "mean": "in all steps together"}


@dataclass(frozen=True)
class Slack:
    """The amounts by which a certificate may be worse; see the module's docstring."""

    margin_factor: float = MARGIN_FACTOR
    margin_floor: float = MARGIN_FLOOR
    traffic_factor: float = TRAFFIC_FACTOR


@dataclass
class Comparison:
    """The result of comparing two certificates.

    Attributes:
        worse: the reasons to refuse, one line each.
        notes: differences that are no reason to refuse.
    """

    worse: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(old: CertificateFile, new: CertificateFile, slack: Slack | None = None) -> Comparison:
    """Compare a certificate with its baseline, the old one."""
    slack = slack or Slack()
    worse = [
        *_identity(old, new),
        *_lost_rules(old, new),
        *_lost_runs(old, new),
        *_margins(old, new, slack),
        *_traffic(old, new, slack),
    ]
    return Comparison(worse, list(_notes(old, new)))


def _identity(old: CertificateFile, new: CertificateFile) -> Iterator[str]:
    """Yield differences in the subject, in its claims, and in the conditions of the judgement."""
    if old.golden != new.golden:
        yield (
            f"changed golden list: {_kit(old)} before, {_kit(new)} now; renew the baseline: "
            "gate --baseline FILE --renew NEW"
        )
    if old.kind != new.kind:
        yield f"changed subject: a {old.kind} before, a {new.kind} now"
    subject_before = old.body["subject"]
    subject_now = new.body["subject"]
    for key in ("hook", "setup", "state", "target"):
        before = subject_before.get(key)
        now = subject_now.get(key)
        if before != now:
            yield f"changed subject: {key} {before or 'none'} before, {now or 'none'} now"
    if old.claims != new.claims:
        yield f"changed claim: {old.claims} before, {new.claims} now"
    if old.profile != new.profile:
        yield (
            f"changed profile: {old.profile} before, {new.profile} now; keep a baseline for each "
            "profile"
        )
    if gone := [str(world) for world in old.worlds if world not in new.worlds]:
        yield f"fewer world sizes: {', '.join(gone)} before, but not now"


def _lost_rules(old: CertificateFile, new: CertificateFile) -> Iterator[str]:
    """Yield the rules that passed before and do not pass now."""
    for number, rule in old.rules.items():
        now = new.rules.get(number)
        if rule["verdict"] == _PASS and (now is None or now["verdict"] != _PASS):
            yield f"lost rule: {numbered_title(rule)}: passed before, {_verdict(now)} now"


def _lost_runs(old: CertificateFile, new: CertificateFile) -> Iterator[str]:
    """Yield the runs that passed before and do not pass now, of rules that did not pass as a whole.

    Such a rule passed in some of its runs only, so that :func:`_lost_rules` does not list it.
    """
    for rule, name, before, now in _common_runs(old, new):
        passed_whole = rule["verdict"] == _PASS
        if not passed_whole and before.get("verdict") == _PASS != now.get("verdict"):
            yield (
                f"lost rule: {numbered_title(rule)} [{name}]: passed before, {_verdict(now)} now"
            )


def _margins(old: CertificateFile, new: CertificateFile, slack: Slack) -> Iterator[str]:
    """Yield the rules whose margin is worse, each with its worst run."""
    worst: dict[str, tuple[float, str]] = {}
    for rule, name, run_before, run_now in _common_runs(old, new):
        before = run_before.get("margin")
        now = run_now.get("margin")
        if before is None or now is None:
            continue
        factor = now / max(before, slack.margin_floor)
        worst_factor, _ = worst.get(rule["rule"], (0.0, ""))
        # Both are written with `not`, so that NaN is worse than any number.
        if not factor <= slack.margin_factor and not factor <= worst_factor:
            floor = ""
            if before < slack.margin_floor:
                floor = f", counting margins below {slack.margin_floor:g} as that"
            line = (
                f"worse margin: {numbered_title(rule)} [{name}]: {before:.2g} of the bound before, "
                f"{now:.2g} now: more than {slack.margin_factor:g} times as much{floor}"
            )
            worst[rule["rule"]] = (factor, line)
    for _, line in worst.values():
        yield line


def _traffic(old: CertificateFile, new: CertificateFile, slack: Slack) -> Iterator[str]:
    """Yield the runs that send more bytes than before."""
    missing = float("nan")
    for rule, name, run_before, run_now in _common_runs(old, new):
        before = run_before.get("traffic")
        now = run_now.get("traffic")
        if not before:
            continue
        lower = f"lower compression: {numbered_title(rule)} [{name}]"
        if not now:
            yield f"{lower}: bytes were counted before, and are not now"
            continue
        more = [
            f"{_SHARES.get(key, key)}: {share:.3g} before, {now.get(key, missing):.3g} now"
            for key, share in before.items()
            # A share that is missing now is NaN, and counts as more.
            if not now.get(key, missing) <= share * slack.traffic_factor
        ]
        if more:
            yield f"{lower}: sends a larger share of its bytes, {', '.join(more)}"


def _notes(old: CertificateFile, new: CertificateFile) -> Iterator[str]:
    """Yield differences that may explain others, and are no reason to refuse."""
    sources_before = old.body["subject"].get("sha256") or {}
    sources_now = new.body["subject"].get("sha256") or {}
    names = sources_before.keys() | sources_now.keys()
    changed = [name for name in names if sources_before.get(name) != sources_now.get(name)]
    if changed:
        yield f"the subject's source has changed: {', '.join(sorted(changed))}"
    if old.registers and old.registers != new.registers:
        before = ", ".join(old.registers)
        yield f"registered {before} before, {', '.join(new.registers) or 'no named hook'} now"
    for key in ("torch", "python", "platform"):
        before = old.body["profile"].get(key)
        now = new.body["profile"].get(key)
        if before != now:
            yield f"{key} {before} before, {now} now"
    yield from _other_variables(old, new)
    origin_before = old.body["claims"].get("declared_by")
    origin_now = new.body["claims"].get("declared_by")
    if origin_before != origin_now:
        yield f"the claims were declared by {origin_before} before, by {origin_now} now"
    runs_now = set(_runs(new))
    if gone := sorted({run[1] for run in _runs(old) if run not in runs_now}):
        yield f"runs that are no longer made: {', '.join(gone)}"
    if any(
        "traffic" in now and "traffic" not in then for _, _, then, now in _common_runs(old, new)
    ):
        yield "the baseline has no count of bytes sent; renew it to have compression compared"


def _other_variables(old: CertificateFile, new: CertificateFile) -> Iterator[str]:
    """Yield the environment variables that differ; version 1 of the format does not name them."""
    before = old.body.get("environment")
    now = new.body.get("environment")
    if before is None or now is None:
        return
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield (
                f"variable {name}: {before.get(name, '(not set)')} before, "
                f"{now.get(name, '(not set)')} now"
            )


def _common_runs(
    old: CertificateFile, new: CertificateFile
) -> Iterator[tuple[Entry, str, Entry, Entry]]:
    """Yield each run that both have: the old rule, the run's name, the old run, the new run."""
    for number, rule in old.rules.items():
        now = new.rules.get(number)
        if now is None:
            continue
        for name, run in rule["runs"].items():
            if name in now["runs"]:
                yield rule, name, run, now["runs"][name]


def _runs(certificate: CertificateFile) -> Iterator[tuple[str, str]]:
    """Yield the number of a rule and the name of a run, for all runs."""
    for number, rule in certificate.rules.items():
        for name in rule["runs"]:
            yield number, name


def _verdict(entry: Entry | None) -> str:
    """Return the verdict of a rule or a run, with its reason."""
    if entry is None:
        return "not in it"
    reason = f" ({entry['reason']})" if entry.get("reason") else ""
    return f"{entry.get('verdict')}{reason}"


def _kit(certificate: CertificateFile) -> str:
    return f"{certificate.golden[:16]} of kit {certificate.body['kit']['version']}"
