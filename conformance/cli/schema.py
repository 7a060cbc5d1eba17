"""``python -m conformance schema``: print the JSON Schema of certificates."""

from conformance.certificates.schema import FILE
from conformance.cli._arguments import Arguments


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: the arguments are wrong.
    """
    parser = Arguments(
        "python -m conformance schema",
        description="Print the JSON Schema of certificate.json, which has the id in `schema`.",
    )
    parser.parse_args(arguments)
    print(FILE.read_text(encoding="utf-8"), end="")
    return 0
