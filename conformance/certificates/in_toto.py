"""A certificate as an in-toto statement with the test-result predicate, for CI to sign. Imports no torch.

Sources: github.com/in-toto/attestation, spec/v1/statement.md, resource_descriptor.md and digest_set.md (v1.1), and
spec/predicates/test-result.md (v0.1). Nothing is added to the fields of the specification.

The subject is what was tested: files that were named, such as the wheel that was installed, or else the source files of which the
certificate holds the digests. Tests are rules, by number and title. Of the rules, those that hold are passed, SHOULD rules that do
not are warned, MUST rules that do not are failed. What does not apply was not tested and is in no list; the certificate has it, and
is the first of the configuration.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.errors import CertificateError, UsageError
from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
PASSED, WARNED, FAILED = "PASSED", "WARNED", "FAILED"


def statement(
    subjects: Sequence[Mapping[str, Any]], predicate: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the whole statement; what signs it may want the predicate alone."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": list(subjects),
        "predicateType": PREDICATE_TYPE,
        "predicate": dict(predicate),
    }


def result_of(path: Path, body: Mapping[str, Any], url: str = "") -> dict[str, Any]:
    """Return the predicate: the result of a session, of which ``path`` is the certificate or, where it was refused, the report.

    Raises:
        CertificateError: the session came to no result: it was narrowed, or the machine or the kit failed.
    """
    verdict = body.get("verdict", "certified")
    if verdict not in ("certified", "refused"):
        reasons = "; ".join(map(str, body.get("reasons", ())))
        raise CertificateError(
            f"{path}: nothing to state: it says {verdict!r} ({reasons}), which is no result of a test"
        )
    passed = _named(body, lambda rule: rule["verdict"] == str(Verdict.PASS))
    warned = _named(
        body, lambda rule: rule["verdict"] == str(Verdict.FAIL) and rule["level"] != MUST
    )
    failed = _named(
        body, lambda rule: rule["verdict"] == str(Verdict.FAIL) and rule["level"] == MUST
    )
    return {
        "result": FAILED if failed else WARNED if warned else PASSED,
        "configuration": list(_configuration(path, body)),
        **({"url": url} if url else {}),
        "passedTests": passed,
        "warnedTests": warned,
        "failedTests": failed,
    }


def subjects(body: Mapping[str, Any], files: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """Return descriptors of what was tested: these files, or the source files of the subject.

    Raises:
        UsageError: a file cannot be read, or there is none and the subject has no source.
    """
    if paths := list(files):
        names = [
            path.name if [other.name for other in paths].count(path.name) == 1 else path.as_posix()
            for path in paths
        ]
        return [
            {"name": name, "digest": {"sha256": _sha256(path)}}
            for name, path in zip(names, paths, strict=True)
        ]
    sources = body["subject"].get("sha256") or {}
    if not sources:
        raise UsageError(
            "the subject has no source file whose digest is known: say what was tested with --subject-file"
        )
    return [{"name": name, "digest": {"sha256": value}} for name, value in sources.items()]


def checksums(described: Iterable[Mapping[str, Any]]) -> str:
    """Return the subjects as ``sha256sum`` prints them, which is how actions/attest takes several."""
    return "".join(f"{one['digest']['sha256']}  {one['name']}\n" for one in described)


def _configuration(path: Path, body: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """What the result rests on: the file with all of it, the golden list, and what was run."""
    kit = body["kit"]
    yield {"name": path.name, "digest": {"sha256": _sha256(path)}, "mediaType": "application/json"}
    yield {
        "name": "golden.txt",
        "digest": {"sha256": kit["golden list"]},
        "annotations": {"kit": f"ddp-conformance {kit['version']}"},
    }
    run = {key: body[key] for key in ("command", "claims", "profile") if key in body}
    text = json.dumps(run, sort_keys=True).encode()
    yield {
        "name": "run.json",
        "digest": {"sha256": hashlib.sha256(text).hexdigest()},
        "content": base64.b64encode(text).decode(),
        "mediaType": "application/json",
    }


def _named(body: Mapping[str, Any], chosen: Any) -> list[str]:
    return [f"{rule['rule']} {rule['title']}" for rule in body["rules"] if chosen(rule)]


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
