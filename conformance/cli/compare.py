"""``python -m conformance compare FILE FILE...``: several results side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.certificates.flaws import read_result
from conformance.certificates.matrix import as_html, as_markdown, as_text, matrix_of
from conformance.cli._arguments import Arguments, print_notes, write
from conformance.errors import CertificateError

_FORMATS = {"text": as_text, "markdown": as_markdown, "html": as_html}


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: a file cannot be opened or written, or the arguments are wrong.
        CertificateError: a file is neither a report nor a certificate.
    """
    options = _parser().parse_args(arguments)
    bodies = [_body(path) for path in options.files]
    try:
        matrix = matrix_of(bodies)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CertificateError(f"a file is no report that this kit can read ({error!r})") from error
    text = _FORMATS[options.format](matrix, all_rules=options.all)
    if options.output:
        write(options.output, text + "\n")
    else:
        print(text)
    return 0


def _parser() -> Arguments:
    parser = Arguments(
        "python -m conformance compare",
        description="Show several results side by side: a column for each, a row for each rule.",
    )
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="a certificate.json or report.json"
    )
    parser.add_argument(
        "--format", choices=_FORMATS, default="text", help="of the table; default: %(default)s"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="show the rules in which the subjects do not differ, too",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the table to this file instead"
    )
    return parser


def _body(path: Path) -> Mapping[str, Any]:
    result = read_result(path)
    print_notes("compare", result.notes)
    return result.body
