"""The host: a process that imports torch once and forks a child per rank and scenario.

Why a process of its own. A rank must start in milliseconds, not in the seconds that importing torch
takes, so it must be forked from a process that has imported already. That process cannot be pytest:
it has threads and plugins, and a fork keeps only one thread of them, with whatever locks the others
held. So the controller *executes* a host, which imports torch, torch.distributed and torch._dynamo
(the first ``DDP()`` of a process imports 829 modules of it otherwise) and nothing of the user's,
runs no tensor operation, and is at exactly one thread when it forks, which it asserts.

Who watches whom. The controller watches the host: when the host dies (a subject may kill its
parent), the controller says so and starts another. The host watches the ranks, from outside, by
pidfd and poll: the first death is the root cause, what its peers say of "connection reset" is
secondary. Ranks die with their host (PR_SET_PDEATHSIG). Processes that a subject leaves behind are
reparented to the host (PR_SET_CHILD_SUBREAPER), which reports and kills them.

What is kept of a run that breaks: the exit status of every rank in the order of their deaths, the
last of what each printed, and, taken before anything is killed, the stacks of all threads
(faulthandler works with the GIL held in C) and the flight recorder's last collectives.

The controller and the host speak JSON lines over a socket pair; records go through files.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def supervise(functions: list[Callable[[], int]], folder: Path, deadline: float, grace: float, controller: int) -> dict[str, Any]:
    """Fork a child per function, watch them to their ends, and return what came of each.

    Args:
        functions: what each rank runs; its result is the exit status.
        folder: the run's folder, with a subfolder per rank.
        deadline: seconds after which ranks still alive are taken to hang.
        grace: seconds that the others get after the first one died.
        controller: the controller's socket, to notice when it hangs up.

    Raises:
        ControllerGone: it did; the children are dead.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "the host has more than one thread: a fork would not be safe"
    children = [_fork(rank, function) for rank, function in enumerate(functions)]
    started = time.monotonic()
    stop, reason = started + deadline, "hang"
    while any(child.exit is None for child in children):
        if not _wait(children, stop - time.monotonic(), controller):
            _kill_what_is_left(children)
            raise ControllerGone
        now = time.monotonic()
        first = min((child.died for child in children if child.died is not None and child.exit != 0), default=None)
        if any(child.printed > OUTPUT_LIMIT for child in children):
            stop, reason = now, "flood"
        elif first is not None and first + grace < stop:
            stop, reason = first + grace, "peer"
        if now >= stop and any(child.exit is None for child in children):
            _collect_evidence(children, folder)
            break
    else:
        reason = "ended"
    left = _kill_what_is_left(children)
    return {
        "stopped": reason,
        "left_processes": left,
        "ranks": [
            {"rank": c.rank, "exit": c.exit, "died": c.died, "printed": c.printed, "output": c.text(), **c.evidence} for c in children
        ],
    }


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
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
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


def _wait(children: list[_Child], seconds: float, controller: int) -> bool:
    """Wait until something happens: a death, output, or the end of the time. False when the controller is gone."""
    poller, owner = select.poll(), {}
    poller.register(controller, select.POLLRDHUP)
    for child in children:
        if child.exit is None:
            poller.register(child.pidfd, select.POLLIN)
            owner[child.pidfd] = child
        if child.output >= 0:
            poller.register(child.output, select.POLLIN)
            owner[child.output] = child
    for fd, _ in poller.poll(max(0.0, seconds) * 1000):
        if fd == controller:
            return False
        child = owner[fd]
        if fd == child.pidfd:
            _, status = os.waitpid(child.pid, 0)
            child.exit, child.died = os.waitstatus_to_exitcode(status), time.monotonic()
        elif not child.read():
            os.close(child.output)
            child.output = -1
    return True


def _collect_evidence(children: list[_Child], folder: Path) -> None:
    """Take stacks and the flight recorder of every rank that is still alive, before it is killed."""
    alive = [child for child in children if child.exit is None]
    for child in alive:
        with contextlib.suppress(OSError):
            os.kill(child.pid, signal.SIGUSR1)
        with contextlib.suppress(OSError):
            os.close(os.open(folder / str(child.rank) / "ask", os.O_WRONLY | os.O_NONBLOCK))
    patience = time.monotonic() + 1.0
    while time.monotonic() < patience:
        written = [_size(folder / str(c.rank) / "stacks.txt") and _size(folder / str(c.rank) / "flight.json") for c in alive]
        if all(written):
            break
        select.select([], [], [], 0.02)


def _kill_what_is_left(children: list[_Child]) -> list[str]:
    """Kill ranks and everything that they started; return the command lines of what outlived its rank."""
    for child in children:
        if child.exit is None:
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGKILL)
            _, status = os.waitpid(child.pid, 0)
            child.exit, child.evidence["killed"] = os.waitstatus_to_exitcode(status), True
        os.close(child.pidfd)
    left = []
    while orphans := _children_of_host():
        for pid in orphans:
            left.append(_command_line(pid))
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
    for child in children:
        while child.output >= 0 and select.select([child.output], [], [], 0)[0]:
            if not child.read():
                os.close(child.output)
                child.output = -1
        if child.output >= 0:
            os.close(child.output)
    return left


def _children_of_host() -> list[int]:
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


def _run(command: dict[str, Any], controller: int) -> dict[str, Any]:
    """Run one scenario."""
    from conformance.rank import run_rank
    from conformance.scenario import scenario_from_json
    from conformance.subject import SubjectSpec

    scenario, world = scenario_from_json(command["scenario"]), command["world"]
    spec = SubjectSpec(**command["subject"]) if command["subject"] else None
    folder = Path(command["folder"])
    for rank in range(world):
        (folder / str(rank)).mkdir()
    patience = command["deadline"] + 60  # the groups' own timeout: the host speaks first

    def rank_function(rank: int) -> Callable[[], int]:
        return lambda: run_rank(scenario, spec, rank, world, folder, command["cwd"], patience)

    functions = [rank_function(rank) for rank in range(world)]
    grace = command["deadline"] if scenario.fault != "none" else GRACE
    outcome = supervise(functions, folder, command["deadline"], grace, controller)
    for rank in outcome["ranks"]:
        for name in ("stacks.txt", "flight.json"):
            with contextlib.suppress(OSError):
                rank[name.partition(".")[0]] = (folder / str(rank["rank"]) / name).read_text(errors="replace")[:20_000]
    return outcome


def _describe(command: dict[str, Any], controller: int) -> dict[str, Any]:
    """Import the subject in a forked process and say what it is."""
    from conformance.errors import ConformanceError
    from conformance.resolve import describe
    from conformance.subject import SubjectSpec

    folder = Path(command["folder"])
    answer = folder / "described.json"

    def function() -> int:
        sys.path.insert(0, command["cwd"])
        try:
            said = describe(SubjectSpec(**command["subject"]))
        except ConformanceError as error:
            said = {"error": str(error)}
        except BaseException as error:
            said = {"error": f"loading it raised {type(error).__name__}: {error}"}
        answer.write_text(json.dumps(said))
        return 0

    outcome = supervise([function], folder, command["deadline"], GRACE, controller)
    rank = outcome["ranks"][0]
    try:
        said: dict[str, Any] = json.loads(answer.read_text())
        return said
    except (OSError, ValueError):
        how = "did not return" if rank.get("killed") else f"ended its process with status {rank['exit']}"
        return {"error": f"importing it {how}"}


def _serve(connection: socket.socket, base: Path) -> None:
    """Answer commands until the controller hangs up, then remove what is left on disk."""
    controller = connection.fileno()
    stream = connection.makefile("rw", encoding="utf-8", newline="\n")
    with contextlib.suppress(ControllerGone, ConnectionError):
        stream.write(json.dumps(_greeting()) + "\n")
        stream.flush()
        for line in stream:
            command = json.loads(line)
            try:
                answer = (_run if command["op"] == "run" else _describe)(command, controller)
            except OSError as error:
                answer = {"kit_error": f"{error.strerror or error}: {error.filename or command['folder']}"}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    shutil.rmtree(base, ignore_errors=True)


def _greeting() -> dict[str, Any]:
    """Import what ranks need, and say what was found."""
    import gc
    import platform

    import torch
    import torch._dynamo
    import torch._dynamo.utils
    import torch.distributed
    import torch.profiler

    import conformance.rank  # noqa: F401

    gc.collect()
    gc.freeze()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gloo": torch.distributed.is_gloo_available(),
        "cuda": torch.version.cuda,
    }


def main() -> None:
    """Run as ``python host.py FD FOLDER``: serve the socket FD, keep runs in FOLDER."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    _serve(connection, Path(sys.argv[2]))


if __name__ == "__main__":
    # Started by path, with no folder of the user's on the path, so that none can shadow what is imported here.
    if (package := str(Path(__file__).resolve().parent.parent)) not in sys.path:
        sys.path.insert(0, package)
    main()
