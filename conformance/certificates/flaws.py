"""The reasons not to accept a certificate, from its content alone.

A certificate is judged by its rules and runs, and not by its own word: its ``certified`` counts for
nothing if a rule of the golden list or a required world size is missing. This module imports no
torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.certificates.certificate import REQUIRED_WORLDS, kit_identity, worlds_left_out
from conformance.certificates.contradictions import contradictions
from conformance.certificates.reader import (
    CertificateFile,
    is_report,
    numbered_title,
    read_certificate,
    read_json,
)
from conformance.certificates.versions import NOTE_ON_VERSION_1, upgraded
from conformance.errors import CertificateError
from conformance.judging.rule import MUST, golden_list
from conformance.judging.verdict import Verdict
from conformance.subjects.kinds import KINDS

_MIN_WORLD_SIZE = re.compile(r"\bmin_world_size\((\d+)\)")


@dataclass(frozen=True)
class Result:
    """A report, or a certificate that this kit accepts.

    Attributes:
        body: the content, with the keys of version 2.
        is_report: whether it is a report.
        notes: lines for the reader.
    """

    body: dict[str, Any]
    is_report: bool
    notes: tuple[str, ...] = ()


def read_result(path: Path) -> Result:
    """Read a report, or a certificate.

    Raises:
        UsageError: the file cannot be opened.
        CertificateError: the file is neither, or this kit does not accept the certificate.
    """
    body = read_json(path)
    if is_report(body):
        return Result(upgraded(body), is_report=True)
    certificate = read_certificate(path)
    if wrong := flaws(certificate):
        raise CertificateError(*(f"{path}: {flaw}" for flaw in wrong))
    notes = (f"{path}: {NOTE_ON_VERSION_1}",) if certificate.version == 1 else ()
    return Result(dict(certificate.body), is_report=False, notes=notes)


def flaws(certificate: CertificateFile) -> list[str]:
    """Return why this kit does not accept a certificate, one line each; empty if it does."""
    if not certificate.of_this_kit:
        # Without the golden list by which it was judged, its rules cannot be checked.
        version = certificate.body["kit"]["version"]
        ours = kit_identity()["golden_list"]
        return [
            f"was judged by the golden list {certificate.golden[:16]} of kit {version}; the golden "
            f"list of this kit is {ours[:16]}; certify again with this kit, or gate with the kit "
            "that wrote it"
        ]
    if certificate.kind not in KINDS:
        return [f"has a kind of subject that this kit does not know: {certificate.kind!r}"]
    found = [
        *_missing_rules(certificate),
        *_missing_worlds(certificate),
        *contradictions(certificate),
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
    judged = certificate.judged_worlds
    if smallest := _MIN_WORLD_SIZE.search(certificate.claims):
        # Few rules apply below the smallest world size that the subject claims to support, so a
        # listed size without a run is no flaw there.
        judged |= {world for world in certificate.worlds if world < int(smallest[1])}
    missing = [
        world for world in REQUIRED_WORLDS if world not in certificate.worlds or world not in judged
    ]
    if missing:
        yield f"is from a development run: {worlds_left_out(missing)}"
