"""``python -m conformance COMMAND``: certify, the same run as ``pytest --pyargs conformance``, and
work on results; ``new`` writes a package to begin with.
"""

import argparse
import importlib
import os
import sys

from conformance import __version__
from conformance.certificates.markdown import printable
from conformance.errors import CertificateError, ConformanceError, UsageError
from conformance.session.options import add_options, suggestion

# Each is a module with main(arguments) -> exit code, imported on use; none of them needs torch.
COMMANDS = {
    "gate": ("conformance.cli.gate", "[--baseline OLD.json] NEW.json"),
    "summary": ("conformance.cli.summary", "FILE..."),
    "compare": ("conformance.cli.compare", "FILE FILE..."),
    "schema": ("conformance.cli.schema", ""),
    "new": ("conformance.cli.new", "NAME"),
    "statement": ("conformance.cli.statement", "CERTIFICATE"),
}
USAGE = "\n       ".join(
    [
        "usage: python -m conformance certify --hook module:attribute [options]",
        "python -m conformance certify --list-rules",
        *(
            f"python -m conformance {name} {takes}".rstrip()
            for name, (_, takes) in COMMANDS.items()
        ),
        "python -m conformance --version",
    ]
)
HELP = ("-h", "--help")


def main(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name == "--version":
        print(__version__)
        return 0
    if name in ("", *HELP):
        print(USAGE)
        return 0 if name else UsageError.exit_code
    if name == "certify":
        return _certify(rest)
    if name not in COMMANDS:
        print(_unknown_command(name), file=sys.stderr)
        return UsageError.exit_code
    try:
        return int(importlib.import_module(COMMANDS[name][0]).main(rest))
    except ConformanceError as error:
        reasons = error.reasons if isinstance(error, CertificateError) else (str(error),)
        print("\n".join(f"{name}: {printable(reason)}" for reason in reasons), file=sys.stderr)
        return error.exit_code


def _unknown_command(name: str) -> str:
    if name.startswith("-"):
        reason = f"{name} is no command; did you mean certify {name}?"
    else:
        reason = f"there is no command {name!r}{suggestion(name, ['certify', *COMMANDS]) or '.'}"
    return f"{printable(reason)} See python -m conformance --help."


def _certify(arguments: list[str]) -> int:
    if set(HELP) & set(arguments):
        print(_help_of_certify(), end="")
        return 0
    try:
        os.getcwd()
    except OSError as error:
        print(f"certify: the current directory: {error.strerror}", file=sys.stderr)
        return UsageError.exit_code
    import pytest

    # This module is part of the package, which pytest can no longer rewrite: of no concern, and an
    # error in some projects.
    quiet = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    return int(
        pytest.main(
            ["-p", "conformance.plugin", "-W", quiet, "--pyargs", "conformance", *arguments]
        )
    )


def _help_of_certify() -> str:
    """Return the kit's options; pytest's own help has hundreds of lines."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance certify",
        usage="%(prog)s --hook module:attribute [options]",
        description="Certify a subject: the same run as pytest --pyargs conformance.",
        epilog="Any option of pytest can be added, such as -k, -x or --junitxml: pytest --help",
    )
    add_options(parser.add_argument)
    return parser.format_help()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
