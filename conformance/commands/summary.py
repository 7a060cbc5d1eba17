"""``python -m conformance summary FILE...``: what sessions came to, in Markdown, for the page of a CI job."""

import os
from pathlib import Path

from conformance.certificate_file import flaws, is_report, read_certificate, read_json
from conformance.commands._arguments import Arguments, append
from conformance.errors import CertificateError
from conformance.summary import session_markdown


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: a file cannot be opened, or the arguments cannot be read.
        CertificateError: a file is no report, and no certificate either.
    """
    parser = Arguments(
        "python -m conformance summary", description="Add a summary to $GITHUB_STEP_SUMMARY; print it where that is not set."
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a report.json or certificate.json")
    files = parser.parse_args(arguments).files
    text = "\n".join(_summary(path) for path in files)
    if target := os.environ.get("GITHUB_STEP_SUMMARY"):
        append(Path(target), text)
    else:
        print(text)
    return 0


def _summary(path: Path) -> str:
    body = read_json(path)
    if not is_report(body):
        certificate = read_certificate(path)
        if wrong := flaws(certificate):
            raise CertificateError(*(f"{path}: {flaw}" for flaw in wrong))
        body = dict(certificate.body)
    try:
        return session_markdown(body)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CertificateError(f"{path}: is no report that this kit can read ({error!r})") from error
