"""Certificates and reports as files, which are checked before anything relies on them.

A certificate is judged by its rules and runs, and not by its own word: its ``certified`` counts for
nothing if a rule of the golden list or a required world size is missing. The digest reveals
accidents and edits. It prevents nobody from writing a certificate of their own with a digest that
fits; for that, a certificate is signed by the machine that made it (``ci/``). This module imports
no torch.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.certificates.certificate import (
    REQUIRED_WORLDS,
    SCHEMA,
    digest,
    kit_identity,
    worlds_left_out,
)
from conformance.errors import CertificateError, UsageError
from conformance.judging.rule import MUST, golden_list
from conformance.judging.verdict import Verdict
from conformance.subjects.kinds import KINDS

# The entries that every certificate has, and their types; a list has any number of such elements.
_SHAPE: dict[str, Any] = {
    "kit": {"version": str, "golden list": str},
    "subject": {"kind": str},
    "claims": {"text": str},
    "profile": {"name": str, "world sizes": [int]},
    "rules": [
        {"rule": str, "level": str, "title": str, "verdict": str, "checks": int, "runs": dict}
    ],
    "digest": str,
}
_TYPES = {str: "a string", int: "an integer", dict: "an object"}

_WORLD_SIZE = re.compile(r"@(\d+)")
_MIN_WORLD_SIZE = re.compile(r"\bmin_world_size\((\d+)\)")


@dataclass(frozen=True)
class CertificateFile:
    """A certificate that is whole and unedited; :func:`flaws` checks its content.

    Attributes:
        path: the file from which it was read.
        body: its content.
    """

    path: Path
    body: Mapping[str, Any]

    @property
    def rules(self) -> dict[str, Mapping[str, Any]]:
        """The entries of the rules, by number."""
        return {rule["rule"]: rule for rule in self.body["rules"]}

    @property
    def kind(self) -> str:
        return str(self.body["subject"]["kind"])

    @property
    def name(self) -> str:
        """The target that was certified."""
        subject = self.body["subject"]
        return str(subject.get("target") or subject.get("hook") or subject.get("setup"))

    @property
    def claims(self) -> str:
        return str(self.body["claims"]["text"])

    @property
    def profile(self) -> str:
        return str(self.body["profile"]["name"])

    @property
    def worlds(self) -> tuple[int, ...]:
        return tuple(self.body["profile"]["world sizes"])

    @property
    def golden(self) -> str:
        """The digest of the golden list by which it was judged."""
        return str(self.body["kit"]["golden list"])

    @property
    def of_this_kit(self) -> bool:
        """Whether it was judged by the golden list of this kit."""
        return self.golden == kit_identity()["golden list"]


def read_json(path: Path) -> dict[str, Any]:
    """Read a certificate or a report.

    Raises:
        UsageError: the file cannot be opened.
        CertificateError: the file is cut short, or is no JSON object.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CertificateError(f"{path}: is no certificate: it is not text") from error
    text = text.strip()
    try:
        body = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        # An object that does not end, or ends too early, was probably cut off while being copied.
        unfinished = text.startswith("{") and (not text.endswith("}") or error.pos >= len(text))
        if not text or unfinished:
            raise CertificateError(f"{path}: is cut short") from error
        raise CertificateError(
            f"{path}: is no certificate: it is not JSON ({error.msg})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{path}: is no certificate: {error}") from error
    if not isinstance(body, dict):
        raise CertificateError(f"{path}: is no certificate: it is not a JSON object")
    return body


def read_certificate(path: Path) -> CertificateFile:
    """Read a certificate that is whole and unedited.

    Raises:
        UsageError: the file cannot be opened.
        CertificateError: the file is no certificate, or was edited or cut short.
    """
    body = read_json(path)
    if is_report(body):
        reasons = "; ".join([body["verdict"], *map(str, body.get("reasons", ()))])
        raise CertificateError(f"{path}: is the report of a session, not a certificate ({reasons})")
    if body.get("schema") != SCHEMA:
        raise CertificateError(f"{path}: is no certificate: its schema is {body.get('schema')!r}")
    if misfit := _misfit(body, _SHAPE) or _misfit_of_optional(body):
        raise CertificateError(f"{path}: is no certificate: {misfit}")
    if body["digest"] != digest(body):
        raise CertificateError(
            f"{path}: was edited: its digest is {body['digest'][:16]}, but its content has "
            f"{digest(body)[:16]}"
        )
    return CertificateFile(path, body)


def is_report(body: Mapping[str, Any]) -> bool:
    """Whether the content of a file of the kit is a session's report."""
    has_results = isinstance(body.get("verdict"), str) and isinstance(body.get("rules"), list)
    return has_results and "schema" not in body


def is_result(path: Path) -> bool:
    """Whether a file is a certificate or a report of the kit, by its schema."""
    # Only regular files are opened: reading a pipe or /dev/full would never end.
    if not path.is_file():
        return False
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(body, dict) and (body.get("schema") == SCHEMA or is_report(body))


def flaws(certificate: CertificateFile) -> list[str]:
    """Return why this kit does not accept a certificate, one line each; empty if it does."""
    if not certificate.of_this_kit:
        # Without the golden list by which it was judged, its rules cannot be checked.
        version = certificate.body["kit"]["version"]
        ours = kit_identity()["golden list"]
        return [
            f"was judged by the golden list {certificate.golden[:16]} of kit {version}; the golden "
            f"list of this kit is {ours[:16]}"
        ]
    if certificate.kind not in KINDS:
        return [f"has a kind of subject that this kit does not know: {certificate.kind!r}"]
    found = [
        *_missing_rules(certificate),
        *_missing_worlds(certificate),
        *_contradictions(certificate),
    ]
    if certificate.body.get("certified") is not True:
        found.insert(0, "is from a development run: it is not marked as certified")
    return found


def _missing_rules(certificate: CertificateFile) -> Iterator[str]:
    """Yield the rules of the golden list that are missing, or do not hold."""
    rules = certificate.rules
    device = str(certificate.body["profile"].get("device", "cpu"))
    golden = golden_list(certificate.kind, device)
    if absent := [number for number in golden if number not in rules]:
        yield (
            f"is from a development run: {len(absent)} of {len(golden)} MUST rules are missing: "
            f"{', '.join(absent)}"
        )
    holds = {str(verdict) for verdict in Verdict if verdict.holds}
    for number in golden:
        if number not in rules:
            continue
        rule = rules[number]
        if rule["verdict"] not in holds:
            yield (
                f"is from a development run: MUST rule {numbered_title(rule)} has the verdict "
                f"{rule['verdict']!r}"
            )
        elif rule["level"] != MUST:
            yield (
                f"contradicts itself: MUST rule {numbered_title(rule)} has the level "
                f"{rule['level']!r}"
            )


def _missing_worlds(certificate: CertificateFile) -> Iterator[str]:
    """Yield the required world sizes at which no rule was judged."""
    judged = {
        int(world)
        for rule in certificate.rules.values()
        for run in rule["runs"]
        for world in _WORLD_SIZE.findall(run)
    }
    if smallest := _MIN_WORLD_SIZE.search(certificate.claims):
        # Few rules apply below the smallest world size that the subject claims to support, so a
        # listed size without a run is no flaw there.
        judged |= {world for world in certificate.worlds if world < int(smallest[1])}
    missing = [
        world for world in REQUIRED_WORLDS if world not in certificate.worlds or world not in judged
    ]
    if missing:
        yield f"is from a development run: {worlds_left_out(missing)}"


def _contradictions(certificate: CertificateFile) -> Iterator[str]:
    """Yield entries that do not agree with each other."""
    numbers = [rule["rule"] for rule in certificate.body["rules"]]
    if twice := sorted({number for number in numbers if numbers.count(number) > 1}):
        yield f"contradicts itself: rule {', '.join(twice)} is listed more than once"
    for rule in certificate.rules.values():
        runs = list(rule["runs"].values())
        checks = sum(run.get("checks", 0) for run in runs)
        contradicts = f"contradicts itself: {numbered_title(rule)} has"
        if rule["checks"] != checks:
            yield f"{contradicts} {rule['checks']} checks, but its runs have {checks}"
        elif runs and rule["verdict"] != _worst(runs):
            yield (
                f"{contradicts} the verdict {rule['verdict']!r}, but its runs have {_worst(runs)!r}"
            )
        elif rule["verdict"] == str(Verdict.PASS) and not rule["checks"]:
            yield f"{contradicts} the verdict 'pass', but no checks"


def _worst(runs: list[Mapping[str, Any]]) -> str:
    """Return the worst verdict of a rule's runs."""
    verdicts = [str(run.get("verdict")) for run in runs]
    for verdict in reversed(Verdict):
        if str(verdict) in verdicts:
            return str(verdict)
    return verdicts[0]


def numbered_title(rule: Mapping[str, Any]) -> str:
    """Return the number and the title of a rule's entry."""
    return f"{rule['rule']} {rule['title']}"


def _misfit_of_optional(body: Mapping[str, Any]) -> str | None:
    """Return which optional entry has the wrong type, or None if all are right."""
    sources = body["subject"].get("sha256") or {}
    if not isinstance(sources, dict):
        return "subject.sha256 is not an object"
    if not all(isinstance(value, str) for value in sources.values()):
        return "subject.sha256 has a value that is not a string"
    for rule in body["rules"]:
        if not all(_is_readable(run) for run in rule["runs"].values()):
            return f"the runs of {numbered_title(rule)} cannot be read"
    return None


def _is_readable(run: Any) -> bool:
    """Whether a run's entries have the types that the kit writes."""
    if not isinstance(run, dict):
        return False
    traffic = run.get("traffic", {})
    if not isinstance(traffic, dict):
        return False
    numbers = [run.get("checks", 0), run.get("margin", 0.0), *traffic.values()]
    return all(isinstance(number, int | float) for number in numbers)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, and refuse a key that occurs twice.

    Of two values for a key, different readers might use different ones.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key occurs twice in an object")
    return made


def _misfit(value: Any, shape: Any, location: str = "") -> str | None:
    """Return which part of a value does not have its shape, or None if all parts do."""
    if value is None:
        return f"{location} is missing"
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{location} is not a list"
        for index, element in enumerate(value):
            if misfit := _misfit(element, shape[0], f"{location}[{index}]"):
                return misfit
        return None
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{location} is not an object"
        for key, inner in shape.items():
            inner_location = f"{location}.{key}" if location else key
            if misfit := _misfit(value.get(key), inner, inner_location):
                return misfit
        return None
    # True and False are integers in Python, but not in JSON.
    is_bool_as_int = shape is int and isinstance(value, bool)
    if not isinstance(value, shape) or is_bool_as_int:
        return f"{location} is not {_TYPES[shape]}"
    return None
