"""Forks a process per rank, watches them from outside by pidfd and poll, and collects evidence.

The first death is the root cause; errors such as "connection reset" that other ranks report
afterwards are secondary. Ranks die with the lane that forked them (PR_SET_PDEATHSIG). Processes
that a subject leaves behind become children of the lane (PR_SET_CHILD_SUBREAPER), which reports and
kills them.

The evidence of a run that breaks is the exit status of every rank in the order of their deaths, the
last lines that each rank printed, and, taken before anything is killed, the stacks of all threads
(faulthandler works while C code holds the GIL) and the last collectives of the flight recorder.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.hosts.fair_clock import FairClock
from conformance.records.files import EVENTS

OUTPUT_KEPT = 8 * 1024  # bytes kept of the beginning and of the end of a rank's output
OUTPUT_LIMIT = 64 * 1024 * 1024  # bytes of output after which a rank is stopped
# Seconds for the peers of a dead rank to fail by themselves; only their evidence depends on it.
GRACE = 3.0
_EVIDENCE_PATIENCE = 1.0  # seconds to wait for evidence files
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Child:
    """One forked process under supervision.

    Attributes:
        output: the reading end of the pipe for stdout and stderr; -1 once it is closed.
        died: when it died, on the monotonic clock.
        printed: the number of bytes that it printed.
        recorded: the file of its record, and the length of the file when evidence was collected.
    """

    rank: int
    pid: int
    pidfd: int
    output: int
    exit: int | None = None
    died: float | None = None
    printed: int = 0
    head: bytes = b""
    tail: bytes = b""
    evidence: dict[str, Any] = field(default_factory=dict)
    recorded: tuple[Path, int] | None = None

    def read_output(self) -> None:
        """Read the output that has arrived; close the pipe at its end."""
        try:
            chunk = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self.close_output()
            return
        self.printed += len(chunk)
        if len(self.head) < OUTPUT_KEPT:
            self.head += chunk[: OUTPUT_KEPT - len(self.head)]
        self.tail = (self.tail + chunk)[-OUTPUT_KEPT:]

    def close_output(self) -> None:
        if self.output >= 0:
            os.close(self.output)
            self.output = -1

    def text(self) -> str:
        """Return the output, with its middle left out if it is long."""
        head = self.head.decode(errors="replace")
        if self.printed <= OUTPUT_KEPT:
            return head
        left_out = self.printed - 2 * OUTPUT_KEPT
        if left_out > 0:
            return f"{head}\n[... {left_out} bytes ...]\n{self.tail.decode(errors='replace')}"
        # The end overlaps with the beginning: only the bytes after the beginning are added.
        rest = self.tail[-(self.printed - OUTPUT_KEPT) :]
        return head + rest.decode(errors="replace")

    def wait(self) -> None:
        """Wait for the end of the process and keep its exit status."""
        _, status = os.waitpid(self.pid, 0)
        self.exit = os.waitstatus_to_exitcode(status)


class ControllerGone(Exception):
    """The controller hung up in the middle of a run."""


class Controller:
    """The process that requested a run, at the other end of a socket.

    A controller on the same machine sends nothing during a run. If anything happens on the socket,
    the controller has hung up.

    Args:
        fd: the socket.
    """

    events = select.POLLRDHUP

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def has_message(self) -> bool:
        """Whether a message has been read already; poll on the socket would not report it."""
        return False

    def stop_reason(self) -> str | None:
        """Return why the controller stops the run, or None if the run goes on.

        Called when something has happened on the socket.

        Raises:
            ControllerGone: the controller hung up.
        """
        raise ControllerGone

    def confirm_kill(self, reason: str) -> None:
        """Return when ranks that are still alive may be killed; their evidence has been taken.

        Raises:
            ControllerGone: the controller hung up.
        """


def supervise(
    functions: dict[int, Callable[[], int]],
    folder: Path,
    deadline: float,
    grace: float,
    controller: Controller,
    *,
    by_progress: bool = False,
) -> dict[str, Any]:
    """Fork a child per function, watch the children to their ends, and return the outcome.

    Args:
        functions: the function of each rank; its result is the exit status of the process.
        folder: the run's folder, with a subfolder per rank.
        deadline: seconds after which ranks that are still alive count as hanging. Those in which a
            rank waits for a processor do not count.
        grace: seconds that the other ranks get after the first one died, by the same clock.
        controller: the process that requested the run.
        by_progress: the deadline begins anew with every event that a rank records, for runs that
            take longer than any deadline.

    Raises:
        ControllerGone: the controller hung up; the children are dead.
    """
    require_one_thread()
    children = [_fork(rank, function) for rank, function in functions.items()]
    try:
        progress = _Progress(children, folder) if by_progress else None
        stopped = _watch(children, folder, deadline, grace, controller, progress)
    except ControllerGone:
        _kill_remaining(children)
        raise
    left_processes = _kill_remaining(children)
    return {
        "stopped": stopped,
        "left_processes": left_processes,
        "ranks": [
            {
                "rank": child.rank,
                "exit": child.exit,
                "died": child.died,
                "printed": child.printed,
                "output": child.text(),
                **child.evidence,
            }
            for child in children
        ],
    }


class _Progress:
    """The growth of the ranks' records.

    Args:
        children: the ranks.
        folder: the run's folder.
    """

    def __init__(self, children: list[_Child], folder: Path) -> None:
        self._files = [folder / str(child.rank) / EVENTS for child in children]
        self._sizes: list[int] = []

    def is_made(self) -> bool:
        """Whether a rank has recorded an event since the last call."""
        before = self._sizes
        self._sizes = [_size(file) for file in self._files]
        return self._sizes != before


def _watch(
    children: list[_Child],
    folder: Path,
    deadline: float,
    grace: float,
    controller: Controller,
    progress: _Progress | None,
) -> str:
    """Watch children until all have ended or the run is stopped; return how the run ended.

    The result is ``ended`` if every child ended by itself. If not, it is the reason to kill those
    that are still alive, and their evidence has been collected.
    """
    clock = FairClock(child.pid for child in children)
    now = 0.0
    stop = deadline
    reason = "hang"
    first_death: float | None = None
    while any(child.exit is None for child in children):
        order = _wait_for_event(children, stop - now, controller)
        now = clock.read()
        if first_death is None and any(child.exit for child in children):
            first_death = now
        if order is not None:
            stop = now
            reason = order
        elif any(child.printed > OUTPUT_LIMIT for child in children):
            stop = now
            reason = "flood"
        elif first_death is not None and first_death + grace < stop:
            stop = first_death + grace
            reason = "peer"
        if reason == "hang" and now >= stop and progress and progress.is_made():
            stop = now + deadline
            continue
        if now >= stop and any(child.exit is None for child in children):
            _collect_evidence(children, folder)
            controller.confirm_kill(reason)
            return reason
    return "ended"


def _fork(rank: int, function: Callable[[], int]) -> _Child:
    """Fork a child that calls a function and ends with its result as the exit status."""
    parent = os.getpid()
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(rank, pid, os.pidfd_open(pid), reading)
    status = 1
    try:
        # A process group of its own: a subject that kills its group does not kill the lane.
        os.setpgid(0, 0)
        if die_with_parent() != parent:
            os._exit(1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.set_blocking(writing, True)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        status = function()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _wait_for_event(children: list[_Child], seconds: float, controller: Controller) -> str | None:
    """Wait for a death, output, a message of the controller's, or the end of the time.

    Returns:
        The controller's reason to stop the run; None if it sent none.
    """
    if controller.has_message:
        return controller.stop_reason()
    poller = select.poll()
    owner: dict[int, _Child] = {}
    poller.register(controller.fd, controller.events)
    for child in children:
        if child.exit is None:
            poller.register(child.pidfd, select.POLLIN)
            owner[child.pidfd] = child
        if child.output >= 0:
            poller.register(child.output, select.POLLIN)
            owner[child.output] = child
    order: str | None = None
    for fd, _ in poller.poll(max(0.0, seconds) * 1000):
        if fd == controller.fd:
            order = controller.stop_reason()
            continue
        child = owner[fd]
        if fd == child.pidfd:
            child.wait()
            child.died = time.monotonic()
        else:
            child.read_output()
    return order


def _collect_evidence(children: list[_Child], folder: Path) -> None:
    """Collect the stacks and the flight recorder of every rank that is alive, before it is killed.

    The signal that requests stacks interrupts a rank that sleeps in C. The rank may then go on, but
    not by its own doing, so :func:`_kill_remaining` removes the events that it records after this.
    """
    alive = [child for child in children if child.exit is None]
    for child in alive:
        events = folder / str(child.rank) / EVENTS
        child.recorded = (events, _size(events))
    for child in alive:
        with contextlib.suppress(OSError):
            os.kill(child.pid, signal.SIGUSR1)
    _wait_until_written([folder / str(child.rank) / "stacks.txt" for child in alive])
    # The flight recorder comes after the stacks: a thread of Python's writes it, and faulthandler
    # must not look at a thread that runs.
    for child in alive:
        fifo = folder / str(child.rank) / "ask"
        with contextlib.suppress(OSError):
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    _wait_until_written([folder / str(child.rank) / "flight.json" for child in alive])


def _wait_until_written(files: Sequence[Path]) -> None:
    """Wait until every file has content and none grows any more, for a second at most."""
    end = time.monotonic() + _EVIDENCE_PATIENCE
    before: list[int] = []
    while time.monotonic() < end:
        sizes = [_size(file) for file in files]
        if all(sizes) and sizes == before:
            return
        before = sizes
        select.select([], [], [], 0.02)


def _kill_remaining(children: list[_Child]) -> list[str]:
    """Kill ranks and everything that they started; return command lines of leftover processes."""
    for child in children:
        if child.exit is None:
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGKILL)
            child.wait()
            child.evidence["killed"] = True
            if child.recorded:
                with contextlib.suppress(OSError):
                    os.truncate(*child.recorded)
        os.close(child.pidfd)
    left_processes = kill_children()
    for child in children:
        while child.output >= 0 and select.select([child.output], [], [], 0)[0]:
            child.read_output()
        # Another process may still hold the writing end.
        child.close_output()
    return left_processes


def kill_children(spare: Collection[int] = ()) -> list[str]:
    """Kill the children of this process except ``spare``, and return their command lines.

    Children of the killed processes become children of this process, and are killed as well.
    """
    killed = []
    while children := set(_children()) - set(spare):
        for pid in sorted(children):
            killed.append(_command_line(pid))
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
    return killed


def die_with_parent() -> int:
    """Make the kernel kill this process when its parent ends, and return the parent's pid.

    The pid is another one if the parent ended before this call.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid()


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def require_one_thread() -> None:
    """Assert that this process has one thread.

    A fork copies one thread, together with the locks that the others held.
    """
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, "more than one thread: a fork would not be safe"


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _command_line(pid: int) -> str:
    line = ""
    with contextlib.suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        line = arguments.decode(errors="replace").strip()
    return line[:200] or f"pid {pid}"


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
