"""The argument parser and the output files of the subcommands."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from conformance.certificates.markdown import printable
from conformance.errors import UsageError

# The variable with the file that GitHub shows as the summary of a job's step.
PAGE = "GITHUB_STEP_SUMMARY"


class Arguments(argparse.ArgumentParser):
    """A parser that raises UsageError for wrong arguments.

    argparse itself exits with 2, which means "interrupted" here.
    """

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def print_notes(command: str, notes: Iterable[str]) -> None:
    """Print notes on a file; standard output holds the result of the command alone."""
    for note in notes:
        print(f"{command}: note: {printable(note)}", file=sys.stderr)


def append(path: Path, text: str) -> None:
    """Append a paragraph to a file. Several commands of a CI job write to one page.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text.rstrip("\n") + "\n\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def write(path: Path, text: str) -> None:
    """Write a whole file.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
