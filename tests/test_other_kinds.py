"""The examples of docs/other-kinds.md hold with the options that the page gives."""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.rules import book
from conformance.subjects.kinds import HOOK, KINDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "other-kinds.md"
DEVELOPMENT_RUN = 7  # nothing failed, and not all rules were judged


@dataclass(frozen=True)
class Example:
    """An example of the page.

    Attributes:
        kind: the kind of subject.
        module: the name of its module in ``mypkg``.
        source: its code.
        options: as the page types them.
    """

    kind: str
    module: str
    source: str
    options: tuple[str, ...]

    def __str__(self) -> str:
        return self.options[1]


def examples() -> list[Example]:
    """Return the examples in the order of the page."""
    found = []
    source = ""
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", PAGE.read_text(), re.MULTILINE):
        code = re.sub("^ {4}", "", block, flags=re.MULTILINE).strip()
        if "def " in code:
            source = code
        for line in code.splitlines():
            if line.startswith("--"):
                option, target, *others = shlex.split(line)
                module = target.partition(":")[0].removeprefix("mypkg.")
                kind = option.removeprefix("--")
                found.append(Example(kind, module, source, (option, target, *others)))
    return found


def write(example: Example, folder: Path) -> None:
    """Write the example's package."""
    (folder / "mypkg").mkdir()
    (folder / "mypkg" / "__init__.py").touch()
    (folder / "mypkg" / f"{example.module}.py").write_text(f"{example.source}\n")


def test_every_kind_has_an_example() -> None:
    assert {example.kind for example in examples()} == KINDS.keys() - {HOOK}


@pytest.mark.ranks
@pytest.mark.rarely
@pytest.mark.parametrize("example", examples(), ids=str)
def test_an_example_holds(tmp_path: Path, example: Example) -> None:
    write(example, tmp_path)
    rules = list(book(example.kind, "cpu"))[:6]
    selected = [text for number in rules for text in ("--rule", number)]
    command = [sys.executable, "-m", "conformance", "certify", *example.options]
    done = subprocess.run(
        [*command, "--world-size", "2", *selected],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == DEVELOPMENT_RUN, done.stdout
