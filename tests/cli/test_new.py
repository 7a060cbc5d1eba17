"""Tests of `new`, and of examples/thirdparty, which it has written."""

import subprocess
import sys
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.cli.new import package
from conformance.errors import UsageError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "thirdparty"
DEVELOPMENT_RUN = 7  # nothing failed, and not all rules were judged


def test_the_example_is_what_the_command_writes() -> None:
    written = {path: (EXAMPLE / path).read_text() for path in package("thirdparty")}
    assert written == package("thirdparty")


def test_a_package_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "project"
    assert main(["new", "mine", "--folder", str(folder)]) == 0
    assert "python -m conformance certify --hook mine:mean_hook" in capsys.readouterr().out
    changed = folder / "src" / "mine" / "__init__.py"
    changed.write_text("# mine")
    assert main(["new", "mine", "--folder", str(folder)]) == UsageError.exit_code
    assert "there is something already" in capsys.readouterr().err
    assert changed.read_text() == "# mine"


@pytest.mark.parametrize("name", ["my-hook", "class", "2", "a/b", "conformance", ""])
def test_names_that_are_no_packages(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", name]) == UsageError.exit_code
    assert "no name of a package" in capsys.readouterr().err


@pytest.mark.ranks
def test_the_example_is_certified_outside_the_repository(tmp_path: Path) -> None:
    """Two rules by the command line, and a part of the package's own test."""
    main(["new", "elsewhere", "--folder", str(tmp_path / "elsewhere")])
    project = tmp_path / "elsewhere"
    command = ["-m", "conformance", "certify", "--hook", "elsewhere:mean_hook"]
    run = subprocess.run(
        [sys.executable, *command, "--rule", "2.1,2.2", "--world-size", "2"],
        cwd=project / "src",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == DEVELOPMENT_RUN, run.stdout
    assert "as rounded(bfloat16)" in run.stdout
