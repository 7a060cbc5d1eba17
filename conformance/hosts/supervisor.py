"""Forks a process per rank, watches them from outside by pidfd and poll, and keeps the evidence when one breaks.

The first death is the root cause, what its peers say of "connection reset" is secondary. Ranks die
with the lane that forked them (PR_SET_PDEATHSIG). Processes that a subject leaves behind are
reparented to the lane (PR_SET_CHILD_SUBREAPER), which reports and kills them.

What is kept of a run that breaks: the exit status of every rank in the order of their deaths, the
last of what each printed, and, taken before anything is killed, the stacks of all threads
(faulthandler works with the GIL held in C) and the flight recorder's last collectives.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.records.files import EVENTS

OUTPUT_KEPT = 8 * 1024  # bytes of the beginning and of the end of what a rank printed
OUTPUT_LIMIT = 64 * 1024 * 1024  # bytes after which a rank that floods its output is stopped
GRACE = 3.0  # seconds for the peers of a dead rank to fail by themselves; evidence only
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass
class _Child:
    """One forked process under supervision."""

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
    recorded: tuple[Path, int] | None = None  # its record, and how long that was when evidence was first asked for

    def read(self) -> bool:
        """Read what is there to read; false at the end of the stream."""
        try:
            chunk = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        self.printed += len(chunk)
        if len(self.head) < OUTPUT_KEPT:
            self.head += chunk[: OUTPUT_KEPT - len(self.head)]
        self.tail = (self.tail + chunk)[-OUTPUT_KEPT:]
        return bool(chunk)

    def text(self) -> str:
        """What was printed, the middle left out."""
        if self.printed <= OUTPUT_KEPT:
            return self.head.decode(errors="replace")
        left_out = max(0, self.printed - 2 * OUTPUT_KEPT)
        tail = self.tail[-(self.printed - OUTPUT_KEPT) :] if self.printed < 2 * OUTPUT_KEPT else self.tail
        return self.head.decode(errors="replace") + (f"\n[... {left_out} bytes ...]\n" if left_out else "") + tail.decode(errors="replace")


class ControllerGone(Exception):
    """The controller hung up in the middle of a run."""


class Controller:
    """Whoever asked for a run, at the other end of a socket. On the same machine all that comes from it meanwhile is that it hangs up.

    Args:
        fd: the socket.
    """

    events = select.POLLRDHUP
    pending = False  # whether something came before the socket was looked at

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def says(self) -> str:
        """Return why the run is to be stopped, or '' where it is to go on; asked when something came. Raises: ControllerGone."""
        raise ControllerGone

    def may_kill(self, reason: str) -> None:
        """Return once ranks that are alive, and whose evidence was taken, may be killed. Raises: ControllerGone."""


def supervise(
    functions: dict[int, Callable[[], int]], folder: Path, deadline: float, grace: float, controller: Controller
) -> dict[str, Any]:
    """Fork a child per function, watch them to their ends, and return what came of each.

    Args:
        functions: what each rank runs, by its number; its result is the exit status.
        folder: the run's folder, with a subfolder per rank.
        deadline: seconds after which ranks still alive are taken to hang.
        grace: seconds that the others get after the first one died.
        controller: whoever asked for the run.

    Raises:
        ControllerGone: it hung up; the children are dead.
    """
    require_one_thread()
    children = [_fork(rank, function) for rank, function in functions.items()]
    try:
        reason = _watch(children, folder, time.monotonic() + deadline, grace, controller)
    except ControllerGone:
        _kill_what_is_left(children)
        raise
    left = _kill_what_is_left(children)
    return {
        "stopped": reason,
        "left_processes": left,
        "ranks": [
            {"rank": c.rank, "exit": c.exit, "died": c.died, "printed": c.printed, "output": c.text(), **c.evidence} for c in children
        ],
    }


def _watch(children: list[_Child], folder: Path, stop: float, grace: float, controller: Controller) -> str:
    """Return why the run is over: ``ended``, or why those that are alive still are to be killed. Their evidence is taken."""
    reason = "hang"
    while any(child.exit is None for child in children):
        order = _wait(children, stop - time.monotonic(), controller)
        now = time.monotonic()
        first = min((child.died for child in children if child.died is not None and child.exit != 0), default=None)
        if order:
            stop, reason = now, order
        elif any(child.printed > OUTPUT_LIMIT for child in children):
            stop, reason = now, "flood"
        elif first is not None and first + grace < stop:
            stop, reason = first + grace, "peer"
        if now >= stop and any(child.exit is None for child in children):
            _collect_evidence(children, folder)
            controller.may_kill(reason)
            return reason
    return "ended"


def _fork(rank: int, function: Callable[[], int]) -> _Child:
    parent = os.getpid()
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(rank, pid, os.pidfd_open(pid), reading)
    status = 1
    try:
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


def _wait(children: list[_Child], seconds: float, controller: Controller) -> str:
    """Wait until something happens: a death, output, word of the controller's, which is returned, or the end of the time."""
    if controller.pending:
        return controller.says()
    poller, owner, order = select.poll(), {}, ""
    poller.register(controller.fd, controller.events)
    for child in children:
        if child.exit is None:
            poller.register(child.pidfd, select.POLLIN)
            owner[child.pidfd] = child
        if child.output >= 0:
            poller.register(child.output, select.POLLIN)
            owner[child.output] = child
    for fd, _ in poller.poll(max(0.0, seconds) * 1000):
        if fd == controller.fd:
            order = controller.says()
            continue
        child = owner[fd]
        if fd == child.pidfd:
            _, status = os.waitpid(child.pid, 0)
            child.exit, child.died = os.waitstatus_to_exitcode(status), time.monotonic()
        elif not child.read():
            os.close(child.output)
            child.output = -1
    return order


def _collect_evidence(children: list[_Child], folder: Path) -> None:
    """Take stacks and the flight recorder of every rank that is still alive, before it is killed.

    The signal that asks for stacks ends what a rank may have slept in, in C: where it goes from there is not its doing any more,
    and :func:`_kill_what_is_left` takes it off the record.
    """
    alive = [child for child in children if child.exit is None]
    for child in alive:
        child.recorded = folder / str(child.rank) / EVENTS, _size(folder / str(child.rank) / EVENTS)
    for child in alive:
        with contextlib.suppress(OSError):
            os.kill(child.pid, signal.SIGUSR1)
    _settled([folder / str(child.rank) / "stacks.txt" for child in alive])
    # Only now: what writes this is a thread of Python's, and one that runs may not be looked at, see faulthandler.
    for child in alive:
        with contextlib.suppress(OSError):
            os.close(os.open(folder / str(child.rank) / "ask", os.O_WRONLY | os.O_NONBLOCK))
    _settled([folder / str(child.rank) / "flight.json" for child in alive])


def _settled(files: list[Path]) -> None:
    """Wait until something is in each file and none grows any more, for a second at most."""
    patience, before = time.monotonic() + 1.0, [0]
    while time.monotonic() < patience and not (all(before) and before == [_size(file) for file in files]):
        before = [_size(file) for file in files]
        select.select([], [], [], 0.02)


def _kill_what_is_left(children: list[_Child]) -> list[str]:
    """Kill ranks and everything that they started; return the command lines of what outlived its rank."""
    for child in children:
        if child.exit is None:
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGKILL)
            _, status = os.waitpid(child.pid, 0)
            child.exit, child.evidence["killed"] = os.waitstatus_to_exitcode(status), True
            if child.recorded:
                with contextlib.suppress(OSError):
                    os.truncate(*child.recorded)
        os.close(child.pidfd)
    left = kill_children()
    for child in children:
        while child.output >= 0 and select.select([child.output], [], [], 0)[0]:
            if not child.read():
                os.close(child.output)
                child.output = -1
        if child.output >= 0:
            os.close(child.output)
    return left


def kill_children(spare: Collection[int] = ()) -> list[str]:
    """Kill this process's children but ``spare``, and whom they leave to it; return their command lines."""
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
    """Have the kernel kill this process when its parent ends; return who that is, which is another where it has ended before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid()


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def require_one_thread() -> None:
    """A fork keeps one thread, with whatever locks the others held."""
    assert len(os.listdir("/proc/self/task")) == 1, "more than one thread: a fork would not be safe"


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return line[:200] or f"pid {pid}"
    return f"pid {pid}"


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
