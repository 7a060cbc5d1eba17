"""``python -m conformance gate [--baseline OLD] [--sources DIR] [--signature FILE] NEW``.

The gate accepts a certificate, or refuses it and prints all reasons. If it accepts, it also prints
the checks that it did not make.
"""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

from conformance.certificates.certificate import coverage_line
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
from conformance.certificates.signatures import Trust, verify_signature
from conformance.certificates.sources import other_sources
from conformance.certificates.versions import NOTE_ON_VERSION_1
from conformance.cli._arguments import PAGE, Arguments, append, write
from conformance.errors import CERTIFIED, REFUSED, CertificateError, UsageError

_NOT_SIGNED = "unsigned: no signature was given (--signature FILE)"
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
    _require_signature(options)
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
    unchecked = []
    if not options.signature:
        unchecked.append(_NOT_SIGNED)
    if not options.sources:
        unchecked.append(_NO_SOURCES)
    return unchecked


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
        action="append",
        metavar="DIR",
        help="refuse a certificate of other source files than those in this folder, or its src; "
        "repeat it if the files are in several folders",
    )
    _add_signature(parser)
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


def _add_signature(parser: Arguments) -> None:
    group = parser.add_argument_group("signature, verified by libraries of the extra [sign]")
    group.add_argument(
        "--signature",
        type=Path,
        metavar="FILE",
        help="refuse a certificate without this signature: GnuPG's detached one, or a Sigstore "
        "bundle",
    )
    group.add_argument(
        "--statement",
        type=Path,
        metavar="FILE",
        help="the signature is of this in-toto statement, which names the certificate's digest",
    )
    group.add_argument(
        "--key",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a public key of GnuPG that is trusted; may be repeated",
    )
    group.add_argument(
        "--keyring", type=Path, metavar="FILE", help="a keyring of GnuPG; trust all keys in it"
    )
    group.add_argument("--identity", metavar="NAME", help="the trusted signer of a Sigstore bundle")
    group.add_argument("--issuer", metavar="URL", help="the OpenID Connect provider of that signer")
    group.add_argument(
        "--trusted-root",
        type=Path,
        metavar="FILE",
        help="Sigstore's trusted_root.json; default: the one that the library has",
    )


def _require_signature(options: argparse.Namespace) -> None:
    """Refuse options on a signature without a signature, which would verify nothing."""
    if options.signature:
        return
    for name in ("statement", "key", "keyring", "identity", "issuer", "trusted_root"):
        if getattr(options, name):
            raise UsageError(
                f"--{name.replace('_', '-')}: name the signature too, with --signature FILE"
            )


def _check(options: argparse.Namespace) -> _Result:
    """Check the certificate, and compare it with the baseline if there is one."""
    signature = _check_signature(options)
    try:
        new = read_certificate(options.certificate)
    except CertificateError as error:
        return _Result(str(options.certificate), [*error.reasons, *signature.flaws])
    result = _Result(
        title=f"{new.name} as {new.claims}, profile {new.profile}",
        flaws=[*(f"{new.path}: {flaw}" for flaw in flaws(new)), *signature.flaws],
        comparison=signature.comparison,
    )
    if new.version == 1:
        result.comparison.notes.append(NOTE_ON_VERSION_1)
    if coverage := new.body.get("coverage"):
        result.comparison.notes.append(coverage_line(coverage))
    required = options.require_profile
    if required and new.profile != required:
        result.flaws.append(
            f"{new.path}: has the profile {new.profile}, but {required} is required"
        )
    if options.sources:
        result.flaws += [f"{new.path}: {flaw}" for flaw in other_sources(new, *options.sources)]
    if options.baseline:
        slack = Slack(options.margin_factor, options.margin_floor, options.traffic_factor)
        notes = result.comparison.notes
        result.comparison = _compare(options.baseline, new, slack, options.renew)
        result.comparison.notes += notes
    return result


def _check_signature(options: argparse.Namespace) -> _Result:
    """Return the flaws of the signature, or a note that names the signer."""
    result = _Result(str(options.certificate), [])
    if options.signature:
        trust = Trust(
            keys=tuple(options.key),
            keyring=options.keyring,
            identity=options.identity,
            issuer=options.issuer,
            root=options.trusted_root,
        )
        try:
            signer = verify_signature(
                options.certificate, options.signature, trust, options.statement
            )
        except CertificateError as error:
            result.flaws += error.reasons
        else:
            result.comparison.notes.append(f"signed by {signer}")
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
