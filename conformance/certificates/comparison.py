"""The gate: what is worse in a certificate than in the one before it. A comparison of two bodies; reads no file, imports no torch.

Margins are errors as a fraction of their bound, so that 1 is where a rule fails. They are compared run by run. Among tiny ones a
factor says nothing (from 0.001 to 0.01 is ten times as much, and no reason to stop anybody): what is below ``margin_floor`` counts
as the floor. What was right bit for bit may so come to ``margin_factor * margin_floor`` of its bound before it is refused.
Traffic is bytes sent as a share of those without compression; ``traffic_factor`` leaves room for a compressor whose choice depends
on roundings, and so on the machine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.certificates.reader import CertificateFile
from conformance.judging.verdict import Verdict

Said = Mapping[str, Any]  # what a certificate says of a rule, or of a run
MARGIN_FACTOR, MARGIN_FLOOR, TRAFFIC_FACTOR = 2.0, 0.05, 1.01


@dataclass(frozen=True)
class Slack:
    """How much worse is no worse; see the module's docstring."""

    margin_factor: float = MARGIN_FACTOR
    margin_floor: float = MARGIN_FLOOR
    traffic_factor: float = TRAFFIC_FACTOR


@dataclass
class Comparison:
    """What two certificates come to.

    Attributes:
        worse: what the gate refuses for, one line each.
        notes: what is different and no worse.
    """

    worse: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(old: CertificateFile, new: CertificateFile, slack: Slack | None = None) -> Comparison:
    """Compare a certificate with the one that it is to be no worse than."""
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
    """What the two are certificates of, and by what."""
    if old.golden != new.golden:
        yield f"changed golden list: {_kit(old)} then, {_kit(new)} now; renew the baseline"
    if old.kind != new.kind:
        yield f"changed subject: a {old.kind} then, a {new.kind} now"
    for key in sorted(
        {"hook", "setup", "state", "target"}
        & (old.body["subject"].keys() | new.body["subject"].keys())
    ):
        then, now = old.body["subject"].get(key), new.body["subject"].get(key)
        if then != now:
            yield f"changed subject: {key} {then or 'none'} then, {now or 'none'} now"
    if old.claims != new.claims:
        yield f"changed claim: {old.claims} then, {new.claims} now"
    if old.profile != new.profile:
        yield f"another profile: {old.profile} then, {new.profile} now; keep a baseline of each"
    if gone := [str(world) for world in old.worlds if world not in new.worlds]:
        yield f"fewer world sizes: {', '.join(gone)} is not among those now"


def _lost_rules(old: CertificateFile, new: CertificateFile) -> Iterator[str]:
    for number, rule in old.rules.items():
        now = new.rules.get(number)
        if rule["verdict"] == _PASS and (now is None or now["verdict"] != _PASS):
            yield f"lost rule: {_named(rule)}: passed then, {_said(now)} now"


def _lost_runs(old: CertificateFile, new: CertificateFile) -> Iterator[str]:
    """Runs of rules that did not pass in all of them then, and so are not lost as a whole."""
    for rule, name, then, run in _both(old, new):
        if rule["verdict"] != _PASS and then.get("verdict") == _PASS != run.get("verdict"):
            yield f"lost rule: {_named(rule)} [{name}]: passed then, {_said(run)} now"


def _margins(old: CertificateFile, new: CertificateFile, slack: Slack) -> Iterator[str]:
    worst: dict[str, tuple[float, str]] = {}
    for rule, name, then, run in _both(old, new):
        before, after = then.get("margin"), run.get("margin")
        if before is None or after is None:
            continue
        times = after / max(before, slack.margin_floor)
        if not times <= slack.margin_factor and not times <= worst.get(rule["rule"], (0.0, ""))[0]:
            floor = (
                f", where less than {slack.margin_floor:g} counts as that"
                if before < slack.margin_floor
                else ""
            )
            said = f"{before:.2g} of the bound then, {after:.2g} now: more than {slack.margin_factor:g} times as much{floor}"
            worst[rule["rule"]] = (times, f"worse margin: {_named(rule)} [{name}]: {said}")
    yield from (line for _, line in worst.values())


def _traffic(old: CertificateFile, new: CertificateFile, slack: Slack) -> Iterator[str]:
    for rule, name, then, run in _both(old, new):
        before, after = then.get("traffic"), run.get("traffic")
        if before and not after:
            yield f"lower compression: {_named(rule)} [{name}]: bytes were counted then, and are not now"
        elif before and after:
            more = [
                key
                for key in before
                if not after.get(key, float("nan")) <= before[key] * slack.traffic_factor
            ]
            said = ", ".join(
                f"{_SHARES.get(key, key)}: {before[key]:.3g} then, {after.get(key, float('nan')):.3g} now"
                for key in more
            )
            if more:
                yield f"lower compression: {_named(rule)} [{name}]: sends more of its bytes, {said}"


def _notes(old: CertificateFile, new: CertificateFile) -> Iterator[str]:
    """What may explain a difference, and is none."""
    before, after = old.body["subject"].get("sha256") or {}, new.body["subject"].get("sha256") or {}
    if changed := sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    ):
        yield f"the subject's source is another: {', '.join(changed)}"
    for key in ("torch", "python", "platform"):
        then, now = old.body["profile"].get(key), new.body["profile"].get(key)
        if then != now:
            yield f"{key} {then} then, {now} now"
    if old.body["claims"].get("said by") != new.body["claims"].get("said by"):
        yield f"claims were said by {old.body['claims'].get('said by')} then, by {new.body['claims'].get('said by')} now"
    if gone := sorted(
        {name for number, name in _runs(old) if (number, name) not in set(_runs(new))}
    ):
        yield f"runs that this kit does not make: {', '.join(gone)}"
    if any("traffic" in run and "traffic" not in then for _, _, then, run in _both(old, new)):
        yield "the baseline does not say how many bytes were sent: renew it to have compression compared"


def _both(old: CertificateFile, new: CertificateFile) -> Iterator[tuple[Said, str, Said, Said]]:
    """Yield of all runs that both have: the rule as it was, the run's name, the run then and now."""
    for number, rule in old.rules.items():
        now = new.rules.get(number)
        for name, then in rule["runs"].items() if now else ():
            if now and name in now["runs"]:
                yield rule, name, then, now["runs"][name]


def _runs(certificate: CertificateFile) -> Iterator[tuple[str, str]]:
    return ((number, name) for number, rule in certificate.rules.items() for name in rule["runs"])


_PASS = str(Verdict.PASS)
_SHARES = {"largest": "in the step that sends most", "mean": "in all steps together"}


def _said(what: Mapping[str, Any] | None) -> str:
    if what is None:
        return "not in it"
    return str(what.get("verdict")) + (f" ({what['reason']})" if what.get("reason") else "")


def _named(rule: Mapping[str, Any]) -> str:
    return f"{rule['rule']} {rule['title']}"


def _kit(certificate: CertificateFile) -> str:
    return f"{certificate.golden[:16]} of kit {certificate.body['kit']['version']}"
