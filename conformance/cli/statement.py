"""``python -m conformance statement FILE``.

It writes an in-toto statement of a certificate, or of a refusal, for CI to sign.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.certificates.flaws import read_result
from conformance.certificates.in_toto import checksums, result_of, statement, subjects
from conformance.cli._arguments import Arguments, print_notes, write
from conformance.errors import CertificateError


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: a file cannot be opened or written, or the arguments are wrong.
        CertificateError: there is nothing to state.
    """
    options = _parser().parse_args(arguments)
    body = _body(options.file)
    tested = subjects(body, options.subject_file)
    predicate = result_of(options.file, body, options.url)
    whole = json.dumps(statement(tested, predicate), indent=1) + "\n"
    if options.predicate:
        write(options.predicate, json.dumps(predicate, indent=1) + "\n")
    if options.checksums:
        write(options.checksums, checksums(tested))
    if options.output:
        write(options.output, whole)
    elif not (options.predicate or options.checksums):
        print(whole, end="")
    return 0


def _parser() -> Arguments:
    parser = Arguments(
        "python -m conformance statement",
        description="Write a certificate, or the refusal of a subject, as an in-toto statement.",
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the certificate.json, or the report.json of a subject that was refused",
    )
    parser.add_argument(
        "--subject-file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a tested file, such as a wheel; may be repeated; default: the subject's source files",
    )
    parser.add_argument(
        "--url",
        default=_job_url(os.environ),
        help="the address of the test run; default: that of the CI job that runs this command",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the statement to this file; default: standard output",
    )
    parser.add_argument(
        "--predicate",
        type=Path,
        metavar="FILE",
        help="write the predicate alone to this file, as actions/attest takes it",
    )
    parser.add_argument(
        "--checksums",
        type=Path,
        metavar="FILE",
        help="write the subjects to this file, in the format of sha256sum",
    )
    return parser


def _job_url(environment: Mapping[str, str]) -> str | None:
    """Return the address of the CI job on GitHub, GitLab or Buildkite; None elsewhere."""
    if run := environment.get("GITHUB_RUN_ID"):
        server = environment.get("GITHUB_SERVER_URL")
        repository = environment.get("GITHUB_REPOSITORY")
        return f"{server}/{repository}/actions/runs/{run}"
    return environment.get("CI_JOB_URL") or environment.get("BUILDKITE_BUILD_URL")


def _body(path: Path) -> dict[str, Any]:
    """Return the content of a valid certificate, or of the report of a subject that was refused."""
    result = read_result(path)
    print_notes("statement", result.notes)
    if result.is_report and result.body["verdict"] == "certified":
        raise CertificateError(f"{path}: is a report; state the certificate instead")
    return result.body
