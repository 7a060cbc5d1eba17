"""Certificates and reports as files.

A file that is read here is a whole certificate with a digest that fits. The digest reveals
accidents. It prevents nobody from writing a certificate of their own; for that, a certificate is
signed by the machine that made it (``ci/``). ``flaws.py`` checks the content of a certificate.
This module imports no torch.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.certificates.certificate import SCHEMA, digest, kit_identity
from conformance.errors import CertificateError, UsageError

# The entries that every certificate has, and their types; a list has any number of such elements.
_SHAPE: dict[str, Any] = {
    "kit": {"version": str, "golden list": str},
    "subject": {"kind": str},
    "claims": {"text": str},
    "profile": {"name": str, "backend": str, "device": str, "world sizes": [int], "torch": str},
    "date": str,
    "command": str,
    "limits": [str],
    "advice": [str],
    "rules": [
        {"rule": str, "level": str, "title": str, "verdict": str, "checks": int, "runs": dict}
    ],
    "digest": str,
}
_TYPES = {str: "a string", int: "an integer", dict: "an object"}

_WORLD_SIZE = re.compile(r"@(\d{1,9})")


@dataclass(frozen=True)
class CertificateFile:
    """A certificate that is whole, with a digest that fits; ``flaws.py`` checks its content.

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
    def judged_worlds(self) -> set[int]:
        """The world sizes of the runs."""
        return {
            int(world)
            for rule in self.rules.values()
            for run in rule["runs"]
            for world in _WORLD_SIZE.findall(run)
        }

    @property
    def sources(self) -> dict[str, str]:
        """The digests of the subject's source files, by the name of the module."""
        return self.body["subject"].get("sha256") or {}

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
    profile = body["profile"]
    if not isinstance(profile.get("devices", 0), int):
        return "profile.devices is not an integer"
    if misfit := _misfit(profile.get("nccl", []), [int], "profile.nccl"):
        return misfit
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
