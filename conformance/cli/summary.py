"""``python -m conformance summary FILE...``: what sessions came to, in Markdown, for the page of a CI job."""

import os
from pathlib import Path

from conformance.certificates.markdown_summary import nothing_markdown, session_markdown
from conformance.certificates.reader import flaws, is_report, read_certificate, read_json
from conformance.cli._arguments import PAGE, Arguments, append, write
from conformance.errors import CertificateError


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: a file cannot be opened, or the arguments cannot be read.
        CertificateError: a file is no report, and no certificate either.
    """
    parser = Arguments(
        "python -m conformance summary",
        description=f"Add a summary to ${PAGE}; print it where there is none.",
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a report.json or certificate.json, or a folder with reports in it",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it to this file too")
    given = parser.parse_args(arguments)
    text = "\n".join(summary for path in given.files for summary in _summaries(path))
    page = os.environ.get(PAGE)
    if page:
        append(Path(page), text)
    if given.output:
        write(given.output, text)
    if not page and not given.output:
        print(text)
    return 0


def _summaries(path: Path) -> list[str]:
    """Of a folder it is the reports: a session that could not be begun has left none, or no folder, and the page is to say so."""
    if path.is_file() or path.suffix == ".json":
        return [_summary(path)]
    return [_summary(report) for report in sorted(path.rglob("report.json"))] or [
        nothing_markdown(str(path))
    ]


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
        raise CertificateError(
            f"{path}: is no report that this kit can read ({error!r})"
        ) from error
