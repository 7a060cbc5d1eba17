"""Progress on a terminal, and none elsewhere."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.session.progress import (
    Progress,
    Terminal,
    progress_line,
    shows_progress,
    terminal_of,
)


@pytest.mark.parametrize(
    ("done", "total", "seconds", "line"),
    [
        (0, 0, 1.0, "run 1: values@2"),
        (2, 40, 1.0, "run 3 of 40: values@2"),
        (10, 40, 5.0, "run 11 of 40: values@2, about 15 s left"),
        (10, 40, 100.0, "run 11 of 40: values@2, about 5 min left"),
        (41, 40, 100.0, "run 42: values@2"),
    ],
)
def test_the_line(done: int, total: int, seconds: float, line: str) -> None:
    assert progress_line("values@2", done, total, seconds) == line


def test_the_line_leaves_the_cursor_in_its_place() -> None:
    written: list[str] = []
    progress = Progress(Terminal(written.append, lambda: 80), clock=lambda: 0.0)
    progress.run("values@2", 0, 3)
    progress.clear()
    progress.clear()
    assert written == ["\x1b7 run 1 of 3: values@2\x1b[K\x1b8", "\x1b[K"]


def test_a_narrow_place_cuts_the_line_or_has_none() -> None:
    written: list[str] = []
    room = 34
    progress = Progress(Terminal(written.append, lambda: room), clock=lambda: 0.0)
    progress.run("a_scenario_with_a_long_name@2", 0, 3)
    assert written == ["\x1b7 run 1 of 3: a_scenario_with_a_lo\x1b[K\x1b8"]
    room = 20
    progress.run("values@2", 0, 3)
    assert len(written) == 1


def test_logs_have_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal_of(io.StringIO()) is None
    assert shows_progress(is_terminal=True)
    assert not shows_progress(is_terminal=False)
    monkeypatch.setenv("TERM", "dumb")
    assert not shows_progress(is_terminal=True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", "true")
    assert not shows_progress(is_terminal=True)


def on_a_terminal(arguments: list[str], cwd: Path, **environment: str) -> str:
    """Return the output of a command that has a terminal."""
    ours, theirs = pty.openpty()
    cleared = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS")}
    process = subprocess.Popen(
        arguments,
        cwd=cwd,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**cleared, "TERM": "xterm", "COLUMNS": "100", **environment},
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the last writer has gone
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    process.wait()
    return output.decode(errors="replace")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "form",
    [
        "command line",
        *(pytest.param(form, marks=pytest.mark.rarely) for form in ("log of CI", "certify")),
    ],
)
def test_a_run_on_a_terminal_names_its_runs(tmp_path: Path, form: str) -> None:
    root = str(Path(__file__).resolve().parents[2])
    options = ["--pyargs", "conformance", "--hook", "hooks_ref:allreduce_hook"]
    options += ["--rule", "2.1", "--world-size", "2"]
    if form == "certify":
        (tmp_path / "test_it.py").write_text(
            "import pytest\nfrom conformance import certify\n\n"
            "def test_it():\n    with pytest.raises(AssertionError):\n"
            "        certify('hooks_ref:allreduce_hook', rule=('2.1',), world_size='2')\n"
        )
        options = ["-p", "conformance.plugin", "test_it.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    if form == "log of CI":
        output = on_a_terminal(command, tmp_path, PYTHONPATH=root, CI="true")
        assert "\x1b7" not in output
        assert "1 passed" in output
        return
    output = on_a_terminal(command, tmp_path, PYTHONPATH=root)
    assert "\x1b7 run 1" in output, output
    assert "values@2" in output
