"""``python -m conformance COMMAND``: certify, the same run as ``pytest --pyargs conformance``, and
work on results.
"""

import importlib
import sys

from conformance.certificates.markdown import printable
from conformance.errors import CertificateError, ConformanceError, UsageError

# Each is a module with main(arguments) -> exit code, imported on use; none of them needs torch.
COMMANDS = {
    "gate": ("conformance.cli.gate", "[--baseline OLD.json] NEW.json"),
    "summary": ("conformance.cli.summary", "FILE..."),
    "statement": ("conformance.cli.statement", "CERTIFICATE"),
}
USAGE = "\n       ".join(
    [
        "usage: python -m conformance certify --hook module:attribute [options]",
        "python -m conformance certify --list-rules",
        *(f"python -m conformance {name} {takes}" for name, (_, takes) in COMMANDS.items()),
    ]
)


def main(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name == "certify":
        return _certify(rest)
    if name not in COMMANDS:
        print(USAGE)
        return 0 if name in ("-h", "--help") else UsageError.exit_code
    try:
        return int(importlib.import_module(COMMANDS[name][0]).main(rest))
    except ConformanceError as error:
        reasons = error.reasons if isinstance(error, CertificateError) else (str(error),)
        print("\n".join(f"{name}: {printable(reason)}" for reason in reasons), file=sys.stderr)
        return error.exit_code


def _certify(arguments: list[str]) -> int:
    import pytest

    # This module is part of the package, which pytest can no longer rewrite: of no concern, and an
    # error in some projects.
    quiet = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    return int(
        pytest.main(
            ["-p", "conformance.plugin", "-W", quiet, "--pyargs", "conformance", *arguments]
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
