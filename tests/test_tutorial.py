"""The tutorial's hooks get the verdicts that the tutorial tells."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
FAILED = 1
DEVELOPMENT_RUN = 7  # nothing failed, and not all rules were judged


def hooks() -> list[str]:
    """Return the tutorial's hooks in order, each as the source of a module."""
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", PAGE.read_text(), re.MULTILINE)
    code = [re.sub("^ {4}", "", block, flags=re.MULTILINE).strip() for block in blocks]
    head = "import torch\nimport torch.distributed as dist\n\n"
    functions = [
        block.removeprefix(head).partition("\n\npytest ")[0] for block in code if "def " in block
    ]
    return [f"{head}{function}\n" for function in functions]


def judged(folder: Path, source: str, options: str) -> subprocess.CompletedProcess[str]:
    (folder / "first.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "--pyargs", "conformance", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *options.split(), "--world-size", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.ranks
def test_the_first_hook_of_the_tutorial_is_refused_as_it_says(tmp_path: Path) -> None:
    world, group, _ = hooks()
    refused = judged(tmp_path, world, "--hook first:mean --rule 2.7")
    assert refused.returncode == FAILED
    assert "2.7 Communicates on the model's own process group only" in refused.stdout
    assert "2.7 Communicates on the model's own process group only" in PAGE.read_text()
    right = judged(tmp_path, group, "--hook first:mean --rule 2.7")
    assert right.returncode == DEVELOPMENT_RUN


@pytest.mark.ranks
@pytest.mark.rarely
def test_the_other_hooks_of_the_tutorial_get_its_verdicts(tmp_path: Path) -> None:
    world, group, halved = hooks()
    claimed = judged(tmp_path, world, "--hook first:mean --claims world_only --rule 2.7")
    assert claimed.returncode == DEVELOPMENT_RUN
    undivided = group.replace(".div_(group.size())", "")
    assert undivided != group
    wrong = judged(tmp_path, undivided, "--hook first:mean --rule 2.1")
    assert wrong.returncode == FAILED
    assert "the sum was not divided" in wrong.stdout
    rounded = judged(
        tmp_path, halved, "--hook first:halved --claims rounded(float16) --rule 2.2,2.10"
    )
    assert rounded.returncode == DEVELOPMENT_RUN
