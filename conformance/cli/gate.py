"""``python -m conformance gate [--baseline OLD] [--sources DIR] NEW``.

The gate accepts a certificate, or refuses it and prints all reasons. If it accepts, it also prints
the checks that it did not make.
"""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

from conformance.certificates.comparison import (
    MARGIN_FACTOR,
    MARGIN_FLOOR,
    TRAFFIC_FACTOR,
    Comparison,
    Slack,
    compare,
)
from conformance.certificates.flaws import flaws
from conformance.certificates.markdown import printable
from conformance.certificates.markdown_summary import gate_markdown
from conformance.certificates.reader import CertificateFile, read_certificate
from conformance.certificates.sources import other_sources
from conformance.cli._arguments import PAGE, Arguments, append, write
from conformance.errors import CERTIFIED, REFUSED, CertificateError, UsageError

_NOT_SIGNED = "the certificate is not signed"
_NO_SOURCES = "the subject's sources were not compared (--sources DIR)"
_EPILOG = "Exit code: 0 the gate holds; 1 refused; 4 the command cannot be run as written."


@dataclass
class _Result:
    """The gate's findings.

    Attributes:
        title: the subject, its claims and its profile; or the path of a file that is no
            certificate.
        flaws: the reasons why the certificate is not accepted by itself.
        comparison: the comparison with the baseline; empty without one.
    """

    title: str
    flaws: list[str]
    comparison: Comparison = field(default_factory=Comparison)


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: a file cannot be opened, or the arguments are wrong.
    """
    options = _parser().parse_args(arguments)
    if options.renew and not options.baseline:
        raise UsageError("--renew: name the baseline's file with --baseline")
    result = _check(options)
    refused = list(result.flaws)
    notes = list(result.comparison.notes)
    if options.renew:
        # A new baseline may be worse than the old one. The differences are printed as notes.
        notes += result.comparison.worse
        if not refused:
            write(options.baseline, options.certificate.read_text(encoding="utf-8"))
            notes.append(f"{options.baseline} is the baseline from now on")
    else:
        refused += result.comparison.worse
    unchecked = [] if refused else _unchecked(options)
    if page := options.summary or os.environ.get(PAGE):
        append(Path(page), gate_markdown(result.title, refused, notes, unchecked))
    lines = [*(f"refused: {line}" for line in refused), *(f"note: {line}" for line in notes)]
    if unchecked:
        lines.append(f"not checked: {'; '.join(unchecked)}")
    lines.append(_last_line(options, result.title, bool(refused)))
    for line in lines:
        # One line each, whatever a certificate contains: nothing in it can imitate the last line.
        print(" ".join(printable(line).split("\n")))
    return REFUSED if refused else CERTIFIED


def _unchecked(options: argparse.Namespace) -> list[str]:
    """Return the properties of an accepted certificate that the gate did not check."""
    # The gate reads no signature: `gh attestation verify` and cosign do.
    return [_NOT_SIGNED] if options.sources else [_NOT_SIGNED, _NO_SOURCES]


def _last_line(options: argparse.Namespace, title: str, refused: bool) -> str:
    if refused:
        return f"GATE REFUSES  {title}"
    if options.baseline and not options.renew:
        return f"GATE HOLDS  {title}, no worse than {options.baseline}"
    return f"GATE HOLDS  {title}"


def _parser() -> Arguments:
    parser = Arguments(
        "python -m conformance gate",
        description="Refuse a file that is no valid certificate, or worse than its baseline.",
        epilog=_EPILOG,
    )
    parser.add_argument("certificate", type=Path, metavar="NEW")
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="OLD",
        help="the certificate that NEW must be no worse than",
    )
    parser.add_argument(
        "--renew",
        action="store_true",
        help="print the differences, and make NEW the baseline if it is a valid certificate",
    )
    parser.add_argument(
        "--require-profile",
        metavar="NAME",
        help="refuse a certificate of another profile, such as gloo-cpu",
    )
    parser.add_argument(
        "--sources",
        type=Path,
        metavar="DIR",
        help="refuse a certificate of other source files than those in this folder, or its src",
    )
    parser.add_argument(
        "--margin-factor",
        type=_at_least_1,
        default=MARGIN_FACTOR,
        metavar="F",
        help="how many times larger a margin may become; default: %(default)s",
    )
    parser.add_argument(
        "--margin-floor",
        type=_fraction,
        default=MARGIN_FLOOR,
        metavar="F",
        help="smaller margins, as fractions of a bound, count as this one; default: %(default)s",
    )
    parser.add_argument(
        "--traffic-factor",
        type=_at_least_1,
        default=TRAFFIC_FACTOR,
        metavar="F",
        help="how many times more bytes may be sent; default: %(default)s",
    )
    parser.add_argument(
        "--summary",
        type=Path,
        metavar="FILE",
        help=f"append the result to this file, in Markdown; default: ${PAGE}, if it is set",
    )
    return parser


def _check(options: argparse.Namespace) -> _Result:
    """Check the certificate, and compare it with the baseline if there is one."""
    try:
        new = read_certificate(options.certificate)
    except CertificateError as error:
        return _Result(str(options.certificate), list(error.reasons))
    result = _Result(
        title=f"{new.name} as {new.claims}, profile {new.profile}",
        flaws=[f"{new.path}: {flaw}" for flaw in flaws(new)],
    )
    required = options.require_profile
    if required and new.profile != required:
        result.flaws.append(
            f"{new.path}: has the profile {new.profile}, but {required} is required"
        )
    if options.sources:
        result.flaws += [f"{new.path}: {flaw}" for flaw in other_sources(new, options.sources)]
    if options.baseline:
        slack = Slack(options.margin_factor, options.margin_floor, options.traffic_factor)
        result.comparison = _compare(options.baseline, new, slack, options.renew)
    return result


def _compare(path: Path, new: CertificateFile, slack: Slack, renew: bool) -> Comparison:
    """Compare with a baseline.

    A baseline that is to be renewed may be missing, or be no valid certificate.
    """
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
    comparison = compare(old, new, slack)
    if old.of_this_kit:
        # A baseline of another golden list is reported by the comparison, and its other flaws would
        # only follow from that.
        wrong = [f"the baseline {path}: {flaw}" for flaw in flaws(old)]
        comparison.worse[:0] = wrong
    return comparison


def _at_least_1(text: str) -> float:
    value = _number(text)
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most 1")
    return value


def _number(text: str) -> float:
    """Return a number, or NaN for any other text."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
