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

from conformance.certificates.canonical import digest, digest_of_version_1
from conformance.certificates.certificate import kit_identity
from conformance.certificates.schema import misfit
from conformance.certificates.versions import SCHEMA, upgraded, version_of
from conformance.errors import CertificateError, UsageError
from conformance.scenarios.clusters import CLUSTERS
from conformance.scenarios.hook import COMPLEX
from conformance.scenarios.sparse import SPARSE

_RUN = re.compile(r"(\w+)@(\d{1,9})")
# Scenarios that bring their own number of ranks, or have groups of three ranks and of two.
_OF_OTHER_SIZES = {scenario.name for scenario in (*CLUSTERS, COMPLEX, SPARSE)}


@dataclass(frozen=True)
class CertificateFile:
    """A certificate that is whole, with a digest that fits; ``flaws.py`` checks its content.

    Attributes:
        path: the file from which it was read.
        body: its content, with the keys of version 2.
        version: the version of the file's format.
    """

    path: Path
    body: Mapping[str, Any]
    version: int = 2

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
    def registers(self) -> tuple[str, ...]:
        """The qualified names of the registered hooks; empty in certificates before version 1.6 of
        the rule book, and for other kinds of subject.
        """
        return tuple(self.body["subject"].get("registers", ()))

    @property
    def claims(self) -> str:
        return str(self.body["claims"]["text"])

    @property
    def profile(self) -> str:
        return str(self.body["profile"]["name"])

    @property
    def worlds(self) -> tuple[int, ...]:
        return tuple(self.body["profile"]["world_sizes"])

    @property
    def judged_worlds(self) -> set[int]:
        """The world sizes of the runs, but for the scenarios that bring their own ranks."""
        return {
            int(world)
            for rule in self.rules.values()
            for run in rule["runs"]
            for scenario, world in _RUN.findall(run)
            if scenario not in _OF_OTHER_SIZES and not scenario.startswith("probe_")
        }

    @property
    def sources(self) -> dict[str, str]:
        """The digests of the subject's source files, by the name of the module."""
        return self.body["subject"].get("sha256") or {}

    @property
    def golden(self) -> str:
        """The digest of the golden list by which it was judged."""
        return str(self.body["kit"]["golden_list"])

    @property
    def of_this_kit(self) -> bool:
        """Whether it was judged by the golden list of this kit."""
        return self.golden == kit_identity()["golden_list"]


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
            raise CertificateError(f"{path}: is cut short: copy it again") from error
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
        raise CertificateError(
            f"{path}: is the report of a session, not a certificate ({reasons}); give "
            "certificate.json, which a certified run writes beside it"
        )
    version = version_of(body)
    if version is None:
        raise CertificateError(f"{path}: is no certificate: {_foreign_schema(body.get('schema'))}")
    converted = upgraded(body) if version == 1 else body
    try:
        wrong = misfit(converted, version)
        actual = digest(body) if version == 2 else digest_of_version_1(body)
    except CertificateError as error:
        raise CertificateError(f"{path}: is no certificate: {error}") from error
    except RecursionError as error:
        raise CertificateError(f"{path}: is no certificate: it is nested too deeply") from error
    named = body.get("digest")
    if isinstance(named, str) and named != actual:
        raise CertificateError(
            f"{path}: was edited: its digest is {named[:16]}, but its content has {actual[:16]}"
        )
    if wrong:
        raise CertificateError(f"{path}: is no certificate: {wrong}")
    return CertificateFile(path, converted, version)


def _foreign_schema(schema: Any) -> str:
    if isinstance(schema, str) and schema.startswith(SCHEMA.removesuffix("2")):
        return f"its schema is {schema!r}, but this kit reads versions 1 and 2"
    return f"its schema is {schema!r}"


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
    return isinstance(body, dict) and (version_of(body) is not None or is_report(body))


def numbered_title(rule: Mapping[str, Any]) -> str:
    """Return the number and the title of a rule's entry."""
    return f"{rule['rule']} {rule['title']}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, and refuse a key that occurs twice.

    Of two values for a key, different readers might use different ones.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key occurs twice in an object")
    return made
