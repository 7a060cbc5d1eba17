"""``python -m conformance gate [--baseline OLD] NEW``: let a certificate pass, or say all that speaks against it."""

import argparse
import os
from pathlib import Path

from conformance.certificates.comparison import (
    MARGIN_FACTOR,
    MARGIN_FLOOR,
    TRAFFIC_FACTOR,
    Comparison,
    Slack,
    compare,
)
from conformance.certificates.markdown import printable
from conformance.certificates.markdown_summary import gate_markdown
from conformance.certificates.reader import CertificateFile, flaws, read_certificate
from conformance.cli._arguments import PAGE, Arguments, append, write
from conformance.errors import CERTIFIED, REFUSED, CertificateError, UsageError

_EPILOG = "Exit code: 0 it may pass; 1 refused; 4 the command cannot be run as written."


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: a file cannot be opened, or the arguments cannot be read.
    """
    given = _parser().parse_args(arguments)
    if given.renew and not given.baseline:
        raise UsageError("--renew: name the file to make the baseline with --baseline")
    title, refused, compared = _weigh(given)
    worse, notes = refused + compared.worse, compared.notes
    if given.renew:
        worse, notes = refused, notes + compared.worse
    if given.renew and not worse:
        write(given.baseline, given.certificate.read_text(encoding="utf-8"))
        notes.append(f"{given.baseline} is the baseline from now on")
    if page := given.summary or os.environ.get(PAGE):
        append(Path(page), gate_markdown(title, worse, notes))
    against = f", no worse than {given.baseline}" if given.baseline and not given.renew else ""
    said = [*(f"refused: {line}" for line in worse), *(f"note: {line}" for line in notes)]
    said.append(f"GATE REFUSES  {title}" if worse else f"GATE HOLDS  {title}{against}")
    print("\n".join(" ".join(printable(line).split("\n")) for line in said))
    return REFUSED if worse else CERTIFIED


def _parser() -> Arguments:
    what = "Refuse a certificate that is none, or worse than its baseline."
    parser = Arguments("python -m conformance gate", description=what, epilog=_EPILOG)
    parser.add_argument("certificate", type=Path, metavar="NEW")
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="OLD",
        help="the certificate that NEW is to be no worse than",
    )
    parser.add_argument(
        "--renew",
        action="store_true",
        help="say what is different, and make NEW the baseline, if it is a certificate",
    )
    parser.add_argument(
        "--require-profile",
        metavar="NAME",
        help="refuse a certificate of another profile, such as gloo-cpu",
    )
    parser.add_argument(
        "--margin-factor",
        type=_at_least_1,
        default=MARGIN_FACTOR,
        metavar="F",
        help="default: %(default)s",
    )
    floor = "margins below it, as fractions of a bound, count as it; default: %(default)s"
    parser.add_argument(
        "--margin-floor", type=_fraction, default=MARGIN_FLOOR, metavar="F", help=floor
    )
    parser.add_argument(
        "--traffic-factor",
        type=_at_least_1,
        default=TRAFFIC_FACTOR,
        metavar="F",
        help="default: %(default)s",
    )
    page = f"add what is said to this file, in Markdown; default: ${PAGE}, where it is set"
    parser.add_argument("--summary", type=Path, metavar="FILE", help=page)
    return parser


def _weigh(given: argparse.Namespace) -> tuple[str, list[str], Comparison]:
    """Return what the certificate is of, why it is none, and how it compares; as far as it can be read."""
    try:
        new = read_certificate(given.certificate)
    except CertificateError as error:
        return str(given.certificate), list(error.reasons), Comparison()
    refused = [f"{new.path}: {flaw}" for flaw in flaws(new)]
    if given.require_profile and new.profile != given.require_profile:
        refused.append(
            f"{new.path}: is of the profile {new.profile}, and {given.require_profile} is required"
        )
    slack = Slack(given.margin_factor, given.margin_floor, given.traffic_factor)
    compared = _compare(given.baseline, new, slack, given.renew) if given.baseline else Comparison()
    return f"{new.name} as {new.claims}, profile {new.profile}", refused, compared


def _compare(path: Path, new: CertificateFile, slack: Slack, renew: bool) -> Comparison:
    """Compare with a baseline. One that is to be renewed need not be there, nor be any good."""
    if not path.exists():
        if renew:
            return Comparison()
        raise UsageError(
            f"{path}: there is no such baseline; --renew makes {new.path} the baseline"
        )
    try:
        old = read_certificate(path)
    except CertificateError as error:
        return Comparison(worse=[f"the baseline {reason}" for reason in error.reasons])
    # That its golden list is another is said by the comparison: what else may be wrong with it follows from that.
    wrong = flaws(old) if old.of_this_kit else []
    compared = compare(old, new, slack)
    return Comparison(
        [*(f"the baseline {path}: {flaw}" for flaw in wrong), *compared.worse], compared.notes
    )


def _at_least_1(text: str) -> float:
    if not 1 <= (value := float(text)) < float("inf"):
        raise ValueError
    return value


def _fraction(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise ValueError
    return value
