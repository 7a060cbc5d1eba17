"""``python -m conformance statement FILE``: an in-toto statement of a certificate, for CI to sign."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.certificates.in_toto import checksums, result_of, statement, subjects
from conformance.certificates.reader import flaws, is_report, read_certificate, read_json
from conformance.cli._arguments import Arguments, write
from conformance.errors import CertificateError


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: a file cannot be opened or written, or the arguments cannot be read.
        CertificateError: there is nothing to state.
    """
    parser = Arguments(
        "python -m conformance statement",
        description="State a certificate, or that a subject was refused, as in-toto has it.",
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the certificate.json, or the report.json of a subject that was refused",
    )
    tested = (
        "what was tested, such as a wheel; may be repeated; default: the subject's source files"
    )
    parser.add_argument(
        "--subject-file", type=Path, action="append", default=[], metavar="FILE", help=tested
    )
    parser.add_argument(
        "--url",
        default=_run(os.environ),
        help="of the run of the tests; default: that of the CI job that runs this",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the statement goes; default: standard output",
    )
    parser.add_argument(
        "--predicate",
        type=Path,
        metavar="FILE",
        help="where the predicate alone goes, as actions/attest takes it",
    )
    parser.add_argument(
        "--checksums",
        type=Path,
        metavar="FILE",
        help="where the subjects go, as sha256sum prints them",
    )
    given = parser.parse_args(arguments)
    body = _body(given.file)
    tested_files, predicate = (
        subjects(body, given.subject_file),
        result_of(given.file, body, given.url),
    )
    whole = json.dumps(statement(tested_files, predicate), indent=1) + "\n"
    if given.predicate:
        write(given.predicate, json.dumps(predicate, indent=1) + "\n")
    if given.checksums:
        write(given.checksums, checksums(tested_files))
    if given.output:
        write(given.output, whole)
    elif not (given.predicate or given.checksums):
        print(whole, end="")
    return 0


def _run(environment: Mapping[str, str]) -> str:
    """Return the URL of the CI job, as GitHub, GitLab or Buildkite say it; '' elsewhere."""
    if run := environment.get("GITHUB_RUN_ID"):
        return f"{environment.get('GITHUB_SERVER_URL')}/{environment.get('GITHUB_REPOSITORY')}/actions/runs/{run}"
    return environment.get("CI_JOB_URL") or environment.get("BUILDKITE_BUILD_URL") or ""


def _body(path: Path) -> dict[str, Any]:
    """Return the body of a certificate that is one, or of the report of a session that refused its subject."""
    body = read_json(path)
    if is_report(body):
        if body["verdict"] == "certified":
            raise CertificateError(f"{path}: is a report; it is the certificate that can be stated")
        return body
    certificate = read_certificate(path)
    if wrong := flaws(certificate):
        raise CertificateError(*(f"{path}: {flaw}" for flaw in wrong))
    return dict(certificate.body)
