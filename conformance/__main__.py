"""``python -m conformance COMMAND``: certify, the same run as ``pytest --pyargs conformance``, and
work on results; ``new`` writes a package to begin with.
"""

import argparse
import importlib
import os
import sys
from dataclasses import dataclass

from conformance import __version__
from conformance.certificates.markdown import printable
from conformance.errors import CertificateError, ConformanceError, UsageError
from conformance.session.options import add_options, suggestion


@dataclass(frozen=True)
class Command:
    """A command on results, or ``new``; none of them needs torch.

    Attributes:
        module: a module with main(arguments) -> exit code, imported on use.
        takes: its arguments.
        summary: its purpose, in one line of the help.
    """

    module: str
    takes: str
    summary: str


COMMANDS = {
    "gate": Command(
        "conformance.cli.gate",
        "[--baseline OLD.json] NEW.json",
        "refuse a certificate, if invalid or worse than OLD",
    ),
    "summary": Command("conformance.cli.summary", "FILE...", "write results as Markdown"),
    "compare": Command("conformance.cli.compare", "FILE FILE...", "show results side by side"),
    "statement": Command(
        "conformance.cli.statement", "CERTIFICATE", "write a certificate as an in-toto statement"
    ),
    "schema": Command("conformance.cli.schema", "", "print the JSON Schema of certificates"),
    "new": Command("conformance.cli.new", "NAME", "write a package with a hook, to begin with"),
}
_LINES = (
    ("certify --hook module:attribute [options]", "judge a subject, and write a certificate"),
    ("certify --list-rules", "list the rules"),
    *((f"{name} {one.takes}".rstrip(), one.summary) for name, one in COMMANDS.items()),
    ("--version", "print the version of the kit"),
)
USAGE = "\n".join(
    [
        "usage: python -m conformance COMMAND",
        "",
        *(f"  {line:<42} {summary}" for line, summary in _LINES),
        "",
        "COMMAND --help has the options of a command.",
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
        return int(importlib.import_module(COMMANDS[name].module).main(rest))
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
