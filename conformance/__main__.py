"""``python -m conformance certify --hook ...``: the same run as ``pytest --pyargs conformance --hook ...``."""

import sys


def main() -> int:
    """Run the command and return its exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] != "certify":
        print("usage: python -m conformance certify --hook module:attribute [options]\n       python -m conformance certify --list-rules")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 4
    import pytest

    # This module is part of the package, which pytest can no longer rewrite: of no concern, and an error in some projects.
    quiet = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    return int(pytest.main(["-p", "conformance.plugin", "-W", quiet, "--pyargs", "conformance", *arguments[1:]]))


if __name__ == "__main__":
    sys.exit(main())
