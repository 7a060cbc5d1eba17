"""The host: a process that imports torch once; its lanes fork a child per rank and scenario.

Why a process of its own. A rank must start in milliseconds, not in the seconds that importing torch
takes, so it must be forked from a process that has imported already. That process cannot be pytest:
it has threads and plugins, and a fork keeps only one thread of them, with whatever locks the others
held. So the controller *executes* a host, which imports torch, torch.distributed and torch._dynamo
(the first ``DDP()`` of a process imports 829 modules of it otherwise) and nothing of the user's (``preload.py``),
runs no tensor operation, and is at exactly one thread when it forks, which it asserts.

Why lanes. A run is mostly waiting, and a subject may kill the process above it. So the host itself
runs nothing: for each run that is to go on at the same time it forks a lane, a process that serves
one connection. A lane that dies takes its one run with it, and its successor is a fork away.

Who watches whom. The controller watches the host and the lanes by their connections; the host says
how a lane ended; a lane watches its ranks (``supervise.py``). When the controller hangs up, lanes
kill their ranks and end, then the host removes the folder and ends.

The controller speaks to the host in packets (each asks for a lane, and brings its connection, or for a sign of life), and
to a lane in JSON lines; records go through files.

On several machines torchrun starts the hosts, as ``-m conformance.host``; the way to their controller is another (``nodes/slot.py``).
"""

import contextlib
import importlib
import json
import os
import platform
import select
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Started by path, with no folder of the user's on the path, so that none can shadow what is imported here.
if __name__ == "__main__" and (package := str(Path(__file__).resolve().parent.parent)) not in sys.path:
    sys.path.insert(0, package)

from conformance.preload import forget_other_references, preload
from conformance.supervise import GRACE, Controller, ControllerGone, adopt_orphans, kill_children, require_one_thread, supervise


def serve_host(control: socket.socket, base: Path) -> None:
    """Import what ranks need, then fork lanes until the controller hangs up; remove what is left on disk."""
    adopt_orphans()
    lanes: dict[int, tuple[int, int]] = {}  # pidfd: number, pid
    with contextlib.suppress(ConnectionError):
        _say(control, {"greeting": warm_up()})
        keep_bytecode(base / "bytecode")
        while True:
            poller = select.poll()
            for fd in (control.fileno(), *lanes):
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll():
                if fd != control.fileno():
                    number, pid = lanes.pop(fd)
                    os.close(fd)
                    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    kill_children(spare={pid for _, pid in lanes.values()})  # what the lane's subject left behind
                    _say(control, {"lane": number, "ended": ended})
                    continue
                packet, fds, _, _ = socket.recv_fds(control, 4096, 1)
                if not packet:
                    raise ConnectionError
                asked = json.loads(packet)
                if "ping" in asked:
                    _say(control, {"pong": asked["ping"]})
                    continue
                number = asked["lane"]
                pid = _fork_lane(fds[0], control, list(lanes))
                lanes[os.pidfd_open(pid)] = number, pid
                os.close(fds[0])
                _say(control, {"lane": number, "pid": pid})
    for _, pid in lanes.values():
        os.waitpid(pid, 0)
    kill_children()
    shutil.rmtree(base, ignore_errors=True)


def keep_bytecode(folder: Path) -> None:
    """Where Python is told to write none, keep the subject's here: else every rank compiles it anew."""
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)


def _say(control: socket.socket, what: dict[str, Any]) -> None:
    control.send(json.dumps(what).encode())


def _fork_lane(connection: int, control: socket.socket, others: list[int]) -> int:
    require_one_thread()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        control.close()
        for fd in others:
            os.close(fd)
        adopt_orphans()
        _serve_lane(socket.socket(fileno=connection))
        status = 0
    finally:
        os._exit(status)


def _serve_lane(connection: socket.socket) -> None:
    """Answer commands until the controller hangs up."""
    stream = connection.makefile("rw", encoding="utf-8", newline="\n")
    with contextlib.suppress(ControllerGone, ConnectionError):
        for line in stream:
            command = json.loads(line)
            try:
                answer = OPERATIONS[command["op"]](command, Controller(connection.fileno()))
            except OSError as error:
                answer = {"kit_error": f"{error.strerror or error}: {error.filename or command['folder']}"}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


def run_here(command: dict[str, Any], controller: Controller) -> dict[str, Any]:
    """Run one scenario: all of its ranks, or those that the command names, each with the environment that it says."""
    from conformance.rank import run_rank
    from conformance.scenario import scenario_from_json
    from conformance.subject import SubjectSpec

    scenario, world = scenario_from_json(command["scenario"]), command["world"]
    spec = SubjectSpec(**command["subject"]) if command["subject"] else None
    folder = Path(command["folder"])
    ranks, environment = command.get("ranks", range(world)), command.get("environment", {})
    for rank in ranks:
        (folder / str(rank)).mkdir()
    patience = command["deadline"] + 60  # the groups' own timeout: the host speaks first

    def rank_function(rank: int) -> Callable[[], int]:
        def function() -> int:
            os.environ.update(environment.get(str(rank), {}))
            return run_rank(scenario, spec, rank, world, folder, command["cwd"], patience)

        return function

    functions = {rank: rank_function(rank) for rank in ranks}
    grace = command["deadline"] if scenario.fault != "none" else GRACE
    outcome = supervise(functions, folder, command["deadline"], grace, controller)
    for rank in outcome["ranks"]:
        for name in ("stacks.txt", "flight.json"):
            with contextlib.suppress(OSError):
                rank[name.partition(".")[0]] = (folder / str(rank["rank"]) / name).read_text(errors="replace")[:20_000]
    return outcome


def describe_here(command: dict[str, Any], controller: Controller) -> dict[str, Any]:
    """Import the subject in a forked process and say what it is."""
    from conformance.resolve import describe
    from conformance.subject import SubjectSpec

    def function() -> dict[str, Any]:
        if command.get("imports"):
            importlib.import_module(command["imports"])
        return describe(SubjectSpec(**command["subject"]))

    return _asked_in_a_fork(function, command, controller, "loading it", "importing it")


def look_here(command: dict[str, Any], controller: Controller) -> dict[str, Any]:
    """Find out in a forked process what this machine has for a profile: to ask is to start the device, which no lane survives."""
    from conformance.machine import look
    from conformance.profiles import profile_from_json

    profile = profile_from_json(command["profile"])
    return _asked_in_a_fork(lambda: look(profile), command, controller, "looking for it", "looking for it")


def _asked_in_a_fork(
    function: Callable[[], dict[str, Any]], command: dict[str, Any], controller: Controller, raising: str, ending: str
) -> dict[str, Any]:
    """Return what a function says in a process of its own; ``error`` says why it said nothing."""
    from conformance.errors import ConformanceError

    folder = Path(command["folder"])
    answer = folder / "said.json"

    def child() -> int:
        os.chdir(command["cwd"])
        sys.path.insert(0, command["cwd"])
        forget_other_references()
        try:
            said = function()
        except ConformanceError as error:
            said = {"error": str(error)}
        except BaseException as error:
            said = {"error": f"{raising} raised {type(error).__name__}: {error}"}
        answer.write_text(json.dumps(said))
        return 0

    outcome = supervise({0: child}, folder, command["deadline"], GRACE, controller)
    rank = outcome["ranks"][0]
    try:
        said: dict[str, Any] = json.loads(answer.read_text())
        return said
    except (OSError, ValueError):
        how = "did not return" if rank.get("killed") else f"ended its process with status {rank['exit']}"
        return {"error": f"{ending} {how}"}


OPERATIONS: dict[str, Callable[[dict[str, Any], Controller], dict[str, Any]]] = {
    "run": run_here,
    "describe": describe_here,
    "look": look_here,
}


def warm_up() -> dict[str, Any]:
    """Import what ranks need, and say what was found."""
    # Inherited by ranks: a thread that wakes does not push aside the one that woke it. Gloo's else spin on locks that those still
    # hold, which takes a seventh of all time.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    preload()
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gloo": torch.distributed.is_gloo_available(),
        "cuda": torch.version.cuda,
    }


def main() -> None:
    """Run as ``python host.py FD FOLDER``: the controller's packets come from socket FD, runs are kept in FOLDER.

    torchrun runs it as ``-m conformance.host``, see ``nodes/slot.py``.
    """
    if len(sys.argv) != 3 or not sys.argv[1].isdecimal():
        from conformance.nodes.slot import serve_slot, start_anew

        return serve_slot(sys.argv[2:]) if sys.argv[1:2] == ["--slot"] else start_anew(sys.argv[1:])
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    serve_host(control, Path(sys.argv[2]))
    os._exit(0)


if __name__ == "__main__":
    main()
