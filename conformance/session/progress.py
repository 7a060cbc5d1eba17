"""Progress while scenarios run: one line on a terminal, and nothing in logs.

The line is written behind the cursor, which then returns to its place. The next text replaces the
line, so that pytest's own output stays as it is. There is no progress if the output is no terminal,
if a CI system runs the command, or if ``TERM`` is ``dumb``.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

_SAVE = "\x1b7"
_RESTORE = "\x1b8"
_ERASE = "\x1b[K"
_NARROWEST = 30
# The environment variables by which pytest, too, recognises CI.
_CI = ("CI", "BUILD_NUMBER")


@dataclass(frozen=True)
class Terminal:
    """A terminal to write progress on.

    Attributes:
        write: writes text at once, as it is.
        room: returns the number of columns from the cursor to the edge.
    """

    write: Callable[[str], object]
    room: Callable[[], int]


class Progress:
    """The progress of one session.

    Args:
        terminal: the terminal; None if nothing is to be written.
        clock: returns seconds.
    """

    def __init__(
        self, terminal: Terminal | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.terminal = terminal
        self._clock = clock
        self._began = clock()
        self._is_shown = False

    def begin(self) -> None:
        """Begin to count the time."""
        self._began = self._clock()

    def run(self, name: str, done: int, total: int) -> None:
        """Show the run that is waited for.

        Args:
            name: the scenario and the world size.
            done: the number of runs before it.
            total: the number of all runs; 0 if it is not known.
        """
        self._show(progress_line(name, done, total, self._clock() - self._began))

    def clear(self) -> None:
        """Remove the line."""
        if self._is_shown and self.terminal:
            self.terminal.write(_ERASE)
            self._is_shown = False

    def _show(self, line: str) -> None:
        if self.terminal is None:
            return
        room = self.terminal.room() - 2
        if room < _NARROWEST:
            return
        self.terminal.write(f"{_SAVE} {line[:room]}{_ERASE}{_RESTORE}")
        self._is_shown = True


def progress_line(name: str, done: int, total: int, seconds: float) -> str:
    """Return the line for a run: its name, its number, and an estimate of the time left."""
    if not total or done >= total:
        return f"run {done + 1}: {name}"
    line = f"run {done + 1} of {total}: {name}"
    # The first runs are the shortest ones, and the host starts meanwhile.
    if done < 5:
        return line
    left = seconds / done * (total - done)
    words = f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min"
    return f"{line}, about {words} left"


def terminal_of(stream: TextIO) -> Terminal | None:
    """Return a stream as a terminal, or None if there is to be no progress on it."""
    if not shows_progress(stream.isatty()):
        return None

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return Terminal(write, lambda: os.get_terminal_size(stream.fileno()).columns)


def shows_progress(is_terminal: bool) -> bool:
    """Whether progress is shown on an output."""
    is_ci = any(os.environ.get(name) for name in _CI)
    return is_terminal and not is_ci and os.environ.get("TERM") != "dumb"


class _Default:
    """The terminal for calls of ``certify()``: pytest captures the streams of a test."""

    find: Callable[[], Terminal | None] | None = None


def use_terminal(find: Callable[[], Terminal | None]) -> None:
    """Set the function that finds the terminal of this process; the pytest plugin calls this."""
    _Default.find = find


def default_terminal() -> Terminal | None:
    """Return the terminal of pytest, or the standard error stream if it is one."""
    if _Default.find is not None:
        return _Default.find()
    return terminal_of(sys.stderr)
