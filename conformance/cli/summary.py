"""``python -m conformance summary FILE...``.

It writes the results of sessions as Markdown, for the page of a CI job.
"""

import os
from pathlib import Path

from conformance.certificates.flaws import read_result
from conformance.certificates.markdown_summary import nothing_markdown, session_markdown
from conformance.cli._arguments import PAGE, Arguments, append, print_notes, write
from conformance.errors import CertificateError


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: a file cannot be opened, or the arguments are wrong.
        CertificateError: a file is neither a report nor a certificate.
    """
    parser = Arguments(
        "python -m conformance summary",
        description=f"Append a summary to the file in ${PAGE}, or print it if there is none.",
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a report.json or certificate.json, or a folder with reports in it",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the summary to this file, too"
    )
    options = parser.parse_args(arguments)
    text = "\n".join(summary for path in options.files for summary in _summaries(path))
    page = os.environ.get(PAGE)
    if page:
        append(Path(page), text)
    if options.output:
        write(options.output, text)
    if not page and not options.output:
        print(text)
    return 0


def _summaries(path: Path) -> list[str]:
    """Return the summary of a file, or the summaries of all reports in a folder."""
    if path.is_file() or path.suffix == ".json":
        return [_summary(path)]
    reports = sorted(path.rglob("report.json"))
    if not reports:
        # A session that could not begin leaves no report, or not even the folder. The page of the
        # job should not be empty then.
        return [nothing_markdown(str(path))]
    return [_summary(report) for report in reports]


def _summary(path: Path) -> str:
    result = read_result(path)
    print_notes("summary", result.notes)
    try:
        return session_markdown(result.body)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CertificateError(
            f"{path}: is no report that this kit can read ({error!r})"
        ) from error
