"""Certificates and reports as files: read, and certificates proved whole before anything is built on them. Imports no torch.

A certificate is believed for what it holds, not for what it says of itself: that it is ``certified`` counts for nothing while a
rule of the golden list, or the ranks that it asks for, are not in it. The digest shows accidents and edits; it keeps nobody from
writing a certificate of their own with a digest that fits. Against that a certificate is signed where it was made (``ci/``).
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.certificates.certificate import REQUIRED_WORLDS, SCHEMA, digest, kit_identity
from conformance.errors import CertificateError, UsageError
from conformance.judging.rule import MUST, golden_list
from conformance.judging.verdict import Verdict
from conformance.subjects.kinds import HOOK, KINDS

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
_WORLD = re.compile(r"@(\d+)")
_SMALLEST = re.compile(r"\bmin_world_size\((\d+)\)")


@dataclass(frozen=True)
class CertificateFile:
    """A certificate that is in one piece, and as it was written. What it says is another question: :func:`flaws`.

    Attributes:
        path: where it was read.
        body: all of it.
    """

    path: Path
    body: Mapping[str, Any]

    @property
    def rules(self) -> dict[str, Mapping[str, Any]]:
        """What is said of each rule, by its number."""
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
        """The digest of the golden list that it was judged by."""
        return str(self.body["kit"]["golden list"])

    @property
    def of_this_kit(self) -> bool:
        """Whether that is the golden list of this kit."""
        return self.golden == kit_identity()["golden list"]


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of the kit's.

    Raises:
        UsageError: it cannot be opened.
        CertificateError: it is cut short, or no JSON object.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CertificateError(f"{path}: is no certificate: it is not text") from error
    whole = text.strip()
    try:
        body = json.loads(whole, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        cut = not whole or (whole[0] == "{" and (whole[-1] != "}" or error.pos >= len(whole)))
        raise CertificateError(
            f"{path}: is cut short"
            if cut
            else f"{path}: is no certificate: it is not JSON ({error.msg})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{path}: is no certificate: {error}") from error
    if not isinstance(body, dict):
        raise CertificateError(f"{path}: is no certificate: it holds no object")
    return body


def read_certificate(path: Path) -> CertificateFile:
    """Read a certificate that is whole: a certificate, in one piece, and not edited.

    Raises:
        UsageError: it cannot be opened.
        CertificateError: it is not whole.
    """
    body = read_json(path)
    if is_report(body):
        said = "; ".join([body["verdict"], *map(str, body.get("reasons", ()))])
        raise CertificateError(
            f"{path}: is the report of a session, which is no certificate ({said})"
        )
    if body.get("schema") != SCHEMA:
        raise CertificateError(f"{path}: is no certificate: its schema is {body.get('schema')!r}")
    if misfit := _misfit(body, _SHAPE) or _misfits(body):
        raise CertificateError(f"{path}: is no certificate: {misfit}")
    if body["digest"] != digest(body):
        raise CertificateError(
            f"{path}: was edited: its digest is {body['digest'][:16]}, that of what it holds {digest(body)[:16]}"
        )
    return CertificateFile(path, body)


def is_report(body: Mapping[str, Any]) -> bool:
    """Whether a file of the kit's is a session's report."""
    return (
        "schema" not in body
        and isinstance(body.get("verdict"), str)
        and isinstance(body.get("rules"), list)
    )


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
    """Return why a certificate is none by this kit's golden list, one line each; nothing where it is one."""
    if not certificate.of_this_kit:
        kit = kit_identity()
        theirs, ours = certificate.golden[:16], kit["golden list"][:16]
        return [
            f"was judged by the golden list {theirs} of kit {certificate.body['kit']['version']}; that of this kit is {ours}"
        ]
    if certificate.kind not in (HOOK, *KINDS):
        return [f"is of a kind of subject that this kit does not know: {certificate.kind!r}"]
    found = (
        []
        if certificate.body.get("certified") is True
        else ["is of a development run: it does not say that it is certified"]
    )
    return [
        *found,
        *_rules_missing(certificate),
        *_worlds_missing(certificate),
        *_contradictions(certificate),
    ]


def _rules_missing(certificate: CertificateFile) -> Iterator[str]:
    golden, rules = (
        golden_list(certificate.kind, str(certificate.body["profile"].get("device", "cpu"))),
        certificate.rules,
    )
    if absent := [number for number in golden if number not in rules]:
        yield f"is of a development run: {len(absent)} of {len(golden)} MUST rules are not in it: {', '.join(absent)}"
    holds = {str(verdict) for verdict in Verdict if verdict.holds}
    for number in golden:
        if number in rules and rules[number]["verdict"] not in holds:
            yield f"is of a development run: {_named(rules[number])} is a MUST rule and said to be {rules[number]['verdict']!r}"
        elif number in rules and rules[number]["level"] != MUST:
            yield f"contradicts itself: {_named(rules[number])} is a MUST rule, and said to be {rules[number]['level']!r}"


def _worlds_missing(certificate: CertificateFile) -> Iterator[str]:
    """A size is in it if a rule was judged there. Fewer ranks than it claims to take may be none of its business."""
    smallest = _SMALLEST.search(certificate.claims)
    judged = {
        int(world)
        for rule in certificate.rules.values()
        for run in rule["runs"]
        for world in _WORLD.findall(run)
    }
    judged |= {world for world in certificate.worlds if smallest and world < int(smallest[1])}
    missing = [
        str(world)
        for world in REQUIRED_WORLDS
        if world not in certificate.worlds or world not in judged
    ]
    if missing:
        yield f"is of a development run: world size {', '.join(missing)} was left out"


def _contradictions(certificate: CertificateFile) -> Iterator[str]:
    numbers = [rule["rule"] for rule in certificate.body["rules"]]
    if twice := sorted({number for number in numbers if numbers.count(number) > 1}):
        yield f"contradicts itself: rule {', '.join(twice)} is in it twice"
    for rule in certificate.rules.values():
        runs = list(rule["runs"].values())
        if rule["checks"] != sum(run.get("checks", 0) for run in runs):
            yield f"contradicts itself: {_named(rule)} is said to have made {rule['checks']} checks, which its runs did not"
        elif runs and rule["verdict"] != _worst(runs):
            yield f"contradicts itself: {_named(rule)} is said to be {rule['verdict']!r}, and by its runs it is {_worst(runs)!r}"
        elif rule["verdict"] == str(Verdict.PASS) and not rule["checks"]:
            yield f"contradicts itself: {_named(rule)} is said to hold, and nothing was checked"


def _worst(runs: list[Mapping[str, Any]]) -> str:
    said = [str(run.get("verdict")) for run in runs]
    return next((str(verdict) for verdict in reversed(Verdict) if str(verdict) in said), said[0])


def _named(rule: Mapping[str, Any]) -> str:
    return f"{rule['rule']} {rule['title']}"


def _misfits(body: Mapping[str, Any]) -> str:
    """Return what has another shape than it has to, of what need not be there; '' if nothing has."""
    sources = body["subject"].get("sha256") or {}
    if not (
        isinstance(sources, dict) and all(isinstance(value, str) for value in sources.values())
    ):
        return "sha256 of subject cannot be read"
    for rule in body["rules"]:
        runs = rule["runs"].values()
        numbers = [
            number
            for run in runs
            if isinstance(run, dict)
            for number in (run.get("checks", 0), run.get("margin", 0.0))
        ]
        traffic = [run.get("traffic", {}) for run in runs if isinstance(run, dict)]
        numbers += [
            number for sent in traffic if isinstance(sent, dict) for number in sent.values()
        ]
        readable = all(isinstance(one, dict) for one in (*runs, *traffic)) and all(
            isinstance(number, int | float) for number in numbers
        )
        if not readable:
            return f"runs of {_named(rule)} cannot be read"
    return ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object whose keys come once each: of two, readers would each believe another."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("it says something twice")
    return made


def _misfit(value: Any, shape: Any, where: str = "") -> str:
    """Return what of a value has another shape than it has to; '' if nothing has."""
    if isinstance(shape, list):
        inner = (
            next((said for one in value if (said := _misfit(one, shape[0], f"one of {where}"))), "")
            if isinstance(value, list)
            else ""
        )
        return inner or ("" if isinstance(value, list) else f"{where} is no list")
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is no object"
        return next(
            (
                said
                for key, one in shape.items()
                if (said := _misfit(value.get(key), one, f"{key} of {where}" if where else key))
            ),
            "",
        )
    right = isinstance(value, shape) and not (shape is int and isinstance(value, bool))
    return "" if right else f"{where} is {'missing' if value is None else 'no ' + shape.__name__}"
