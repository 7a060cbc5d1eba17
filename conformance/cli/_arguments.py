"""Arguments of a command: wrong ones end as everything else that is wrong does."""

import argparse
from pathlib import Path
from typing import NoReturn

from conformance.errors import UsageError

PAGE = "GITHUB_STEP_SUMMARY"  # names the file that GitHub shows as the summary of a job's step


class Arguments(argparse.ArgumentParser):
    """A parser that raises UsageError; argparse itself would exit with 2, which is "interrupted" here."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def append(path: Path, text: str) -> None:
    """Add a paragraph to a file, as a CI job's summary is written: by several, one after another.

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
    """Write a file whole.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
