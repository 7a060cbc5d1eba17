"""A certificate as an in-toto statement with the test-result predicate, for CI to sign.

Sources: github.com/in-toto/attestation, spec/v1/statement.md, resource_descriptor.md and
digest_set.md (v1.1), and spec/predicates/test-result.md (v0.1). Nothing is added to the fields of
the specification. This module imports no torch.

The subject of the statement is the tested software: files that the caller names, such as the wheel
that was installed, or else the source files whose digests are in the certificate. The tests of the
statement are rules, by number and title: rules that hold are passed, SHOULD rules that fail are
warned, and MUST rules that fail are failed. A rule that does not apply was not tested and is in no
list. The certificate lists it, and is itself the first entry of the configuration.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.errors import CertificateError, UsageError
from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict
from conformance.records.digests import sha256_of_file

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
PASSED = "PASSED"
WARNED = "WARNED"
FAILED = "FAILED"


def statement(
    subjects: Sequence[Mapping[str, Any]], predicate: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the whole statement. Some signers take the predicate alone."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": list(subjects),
        "predicateType": PREDICATE_TYPE,
        "predicate": dict(predicate),
    }


def result_of(path: Path, body: Mapping[str, Any], url: str | None = None) -> dict[str, Any]:
    """Return the predicate for the result of a session.

    Args:
        path: the session's certificate, or its report if the subject was refused.
        body: the content of that file.
        url: the address of the CI job, if there is one.

    Raises:
        CertificateError: the session has no result: it was a development run, or the machine or the
            kit failed.
    """
    verdict = body.get("verdict", "certified")
    if verdict not in ("certified", "refused"):
        reasons = "; ".join(map(str, body.get("reasons", ())))
        raise CertificateError(
            f"{path}: nothing to state: the verdict is {verdict!r} ({reasons}), which is no test "
            "result"
        )
    passed = _names(body, lambda rule: rule["verdict"] == str(Verdict.PASS))
    warned = _names(body, lambda rule: _fails(rule) and rule["level"] != MUST)
    failed = _names(body, lambda rule: _fails(rule) and rule["level"] == MUST)
    result = PASSED
    if failed:
        result = FAILED
    elif warned:
        result = WARNED
    return {
        "result": result,
        "configuration": list(_configuration(path, body)),
        **({"url": url} if url else {}),
        "passedTests": passed,
        "warnedTests": warned,
        "failedTests": failed,
    }


def subjects(body: Mapping[str, Any], files: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """Return descriptors of the tested files: those given, or the source files of the subject.

    Raises:
        UsageError: a file cannot be read, or none is given and the subject has no source file.
    """
    if paths := list(files):
        names = [path.name for path in paths]
        return [
            {
                # Names have to be unique in a statement: files of one name keep their folders.
                "name": path.name if names.count(path.name) == 1 else path.as_posix(),
                "digest": {"sha256": _sha256(path)},
            }
            for path in paths
        ]
    sources = body["subject"].get("sha256") or {}
    if not sources:
        raise UsageError(
            "the certificate has no digest of a source file: name the tested files with "
            "--subject-file"
        )
    return [{"name": name, "digest": {"sha256": value}} for name, value in sources.items()]


def checksums(descriptors: Iterable[Mapping[str, Any]]) -> str:
    """Return the subjects in the format of ``sha256sum``, in which actions/attest takes several."""
    return "".join(f"{one['digest']['sha256']}  {one['name']}\n" for one in descriptors)


def _configuration(path: Path, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of the result: the whole file, the golden list, and the command line."""
    kit = body["kit"]
    yield {
        "name": path.name,
        "digest": {"sha256": _sha256(path)},
        "mediaType": "application/json",
    }
    yield {
        "name": "golden.txt",
        "digest": {"sha256": kit["golden_list"]},
        "annotations": {"kit": f"ddp-conformance {kit['version']}"},
    }
    keys = ("command", "claims", "profile", "environment", "seed", "reproduce")
    run = {key: body[key] for key in keys if key in body}
    text = json.dumps(run, sort_keys=True).encode()
    yield {
        "name": "run.json",
        "digest": {"sha256": hashlib.sha256(text).hexdigest()},
        "content": base64.b64encode(text).decode(),
        "mediaType": "application/json",
    }


def _fails(rule: Mapping[str, Any]) -> bool:
    return bool(rule["verdict"] == str(Verdict.FAIL))


def _names(body: Mapping[str, Any], selects: Callable[[Mapping[str, Any]], bool]) -> list[str]:
    return [f"{rule['rule']} {rule['title']}" for rule in body["rules"] if selects(rule)]


def _sha256(path: Path) -> str:
    try:
        return sha256_of_file(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
