"""The commands of docs/stories.md print the lines below them.

The first story is not among these tests, since chance decides whether its ranks part.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "stories.md"
REFUSED = 1


def stories() -> list[tuple[str, list[str]]]:
    """Return the commands of the later stories, and the lines that they print."""
    blocks = re.findall(r"(?:^ {4}.+\n)+", PAGE.read_text(), re.MULTILINE)
    assert len(blocks) == 6
    return [
        (command.strip(), [line.strip() for line in said.splitlines()])
        for command, said in zip(blocks[::2], blocks[1::2], strict=True)
    ][1:]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param(*told, id=name, marks=[pytest.mark.rarely] * (name == "resumes-wrongly"))
        for told, name in zip(stories(), ("keeps-nan", "resumes-wrongly"), strict=True)
    ],
)
def test_a_story_is_refused_as_it_says(command: str, said: list[str], tmp_path: Path) -> None:
    program, kit, *options = shlex.split(command)
    assert [program, kit] == ["pytest", "conformance/"]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(ROOT / "conformance"), "-p", "no:cacheprovider"),
            *(*options, "--certificate", str(tmp_path / "certificate.json")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == REFUSED, run.stdout
    printed = {line.strip() for line in run.stdout.splitlines()}
    assert set(said) <= printed, run.stdout
