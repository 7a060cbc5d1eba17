"""The host that torchrun starts; it forks the rank that a run has there.

It is the host of ``host.py`` with another entrance. torchrun starts it, watches it and restarts it.
The host announces in the rendezvous store where it listens, and a controller connects: once for
control, and once for each lane. A connection must begin with the token of the announcement.

The host serves one controller at a time. When the controller leaves, or its machine no longer
answers, the host kills its ranks, removes its folders, and waits for the next controller. The host
dies with torchrun's agent, the lanes die with the host, and ranks with their lane.
"""

import contextlib
import fcntl
import gc
import json
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.hosts.environment import fast_folder, host_command
from conformance.hosts.memory import host_environment
from conformance.hosts.operations import OPERATIONS, keep_code, run_ranks, warm_up
from conformance.hosts.remote.rendezvous import (
    Announcement,
    kit_digest,
    make_announcement,
    publish,
)
from conformance.hosts.remote.wire import RECORDS, SAVED, ConnectionLost, Stream
from conformance.hosts.supervisor import (
    Controller,
    ControllerGone,
    adopt_orphans,
    die_with_parent,
    kill_children,
    require_one_thread,
)
from conformance.records.files import MEETING
from conformance.scenarios.environment import KIT_ENVIRONMENT

HANDSHAKE = 30.0  # seconds for a controller to permit that ranks are killed
HELLO_LIMIT = 1 << 16  # bytes of a connection's first message
MAX_PENDING = 32  # connections without a first message
_FOLDER_PREFIX = "conformance-host-"
_ONCE = "--once"
_USAGE = (
    "conformance.host is started by torchrun: torchrun --nnodes=2 --nproc-per-node=2 "
    "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT -m conformance.host"
)


def execute_torchrun_host(flag: str, arguments: list[str]) -> None:
    """Replace this process by ``host.py``, in the way in which a pool starts it.

    The new program has no current folder on its import path, and the environment of ranks.

    Args:
        flag: the argument by which ``host.py`` recognises this kind of host.
        arguments: the user's arguments.
    """
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        sys.exit(_USAGE)
    unknown = [argument for argument in arguments if argument != _ONCE]
    if unknown:
        sys.exit(
            f"conformance.host: {unknown[0]} is not an option; "
            f"there is {_ONCE}, to end when a controller has finished"
        )
    environment = host_environment({**os.environ, **KIT_ENVIRONMENT})
    # Between nodes Gloo cannot use the loopback interface. The user's own choice goes first.
    if "GLOO_SOCKET_IFNAME" in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    elif os.environ.get("GROUP_WORLD_SIZE") != "1":
        del environment["GLOO_SOCKET_IFNAME"]
    # Each host hashes strings in its own way, also where the caller has one seed for all.
    environment["PYTHONHASHSEED"] = str(1 + int(os.environ["RANK"]))
    # The level DETAIL crashes DDP in torch 2.13.
    environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
    sys.stdout.flush()
    os.execve(sys.executable, host_command(flag, *arguments), environment)


def serve_torchrun_host(arguments: list[str]) -> None:
    """Serve controllers, one after another; with ``--once`` until one has finished."""
    if die_with_parent() == 1:
        # torchrun's agent has ended already, and init is the parent.
        return
    folder = _make_folder()
    try:
        for stop in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop, lambda number, _: sys.exit(128 + number))
        adopt_orphans()
        _TorchrunHost(folder, once=_ONCE in arguments).serve()
    finally:
        kill_children()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _ConnectedController:
    """The controller that a host serves.

    Attributes:
        stream: its control connection.
        id: identifies it; it may connect again.
        name: how a person finds it.
    """

    stream: Stream
    id: str
    name: str


class _TorchrunHost:
    """A host's state: its controller, and the lanes that it has forked.

    Args:
        folder: the host's own folder, on a disk of this machine.
        once: end when a controller has finished.
    """

    def __init__(self, folder: Path, once: bool) -> None:
        self._folder = folder
        self._once = once
        self._finished = False
        self._id = secrets.token_hex(8)
        self._token = secrets.token_hex(16)
        loopback = os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1")
        self._listener = _listen("127.0.0.1" if loopback else None)
        self._controller: _ConnectedController | None = None
        # Connections that have not sent their first message, by file descriptor.
        self._pending: dict[int, Stream] = {}
        # The number and the pid of each lane, by its pidfd.
        self._lanes: dict[int, tuple[int, int]] = {}
        # Exit statuses of lanes by number, the lanes whose end the controller requested, and those
        # among them that had not ended by themselves.
        self._lane_exits: dict[int, int] = {}
        self._end_requested: set[int] = set()
        self._killed: set[int] = set()
        # The process that keeps the store, if this host must keep one.
        self._store_process: set[int] = set()

    def serve(self) -> None:
        """Announce this host, and serve controllers."""
        port = self._listener.getsockname()[1]
        host = make_announcement(self._id, self._token, _addresses(), port)
        self._greeting = {**warm_up(), "kit": kit_digest(), "id": self._id}
        keep_code(self._folder)
        agents_share_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if host.host_rank == 0 and not agents_share_store:
            self._store_process = {_fork_store(*host.store)}
        address, store_port = host.store
        try:
            publish(host)
        except RuntimeError as error:
            sys.exit(
                "conformance: the store of the rendezvous does not answer "
                f"at {address}:{store_port}: {error}"
            )
        # The objects made since the imports stay as well, and lanes are forked with them.
        gc.collect()
        gc.freeze()
        print(_waiting_line(host), flush=True)
        while not self._finished:
            self._serve_events()

    def _serve_events(self) -> None:
        """Wait for connections, messages and ends of lanes, and handle them."""
        poller = select.poll()
        control = [self._controller.stream.fileno()] if self._controller else []
        for fd in (self._listener.fileno(), *control, *self._pending, *self._lanes):
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll():
            # An event handled before this one may have closed the descriptor, so each handler is
            # chosen by the present state.
            if fd in self._lanes:
                self._collect_lane(fd)
            elif fd == self._listener.fileno():
                self._accept()
            elif fd in self._pending:
                self._read_first_message(fd)
            elif self._controller and fd == self._controller.stream.fileno():
                self._serve_controller(self._controller)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            stream = Stream(connection)
            self._pending[stream.fileno()] = stream
            if len(self._pending) > MAX_PENDING:
                oldest = next(iter(self._pending))
                self._pending.pop(oldest).close()

    def _read_first_message(self, fd: int) -> None:
        """Use a connection for the purpose that it names; close it if it lacks the token."""
        stream = self._pending[fd]
        message: dict[str, Any] | None
        try:
            stream.read()
            message = stream.next_message()
            if message is None and stream.buffered < HELLO_LIMIT:
                return
        except ConnectionLost:
            message = None
        del self._pending[fd]
        if message is None or not self._has_token(message):
            stream.close()
        elif message.get("wants") == "control":
            self._accept_controller(stream, message)
        elif message.get("wants") == "lane" and self._controller:
            self._fork_lane(stream, message)
        else:
            stream.close()

    def _has_token(self, message: dict[str, Any]) -> bool:
        token = str(message.get("token")).encode(errors="replace")
        return secrets.compare_digest(token, self._token.encode())

    def _accept_controller(self, stream: Stream, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionLost):
            if self._controller and message.get("id") != self._controller.id:
                stream.send({"busy": self._controller.name})
                stream.close()
                return
            self._release()
            name = str(message.get("name"))
            self._controller = _ConnectedController(stream, str(message.get("id")), name)
            stream.send({"greeting": self._greeting})

    def _serve_controller(self, controller: _ConnectedController) -> None:
        """Answer the controller's messages; release this host when the controller hangs up."""
        stream = controller.stream
        try:
            stream.read()
            while (message := stream.next_message()) is not None:
                if "ping" in message:
                    stream.send({"pong": message["ping"], "clock": time.monotonic()})
                if "end" in message:
                    self._end_lane(message["end"])
                if "bye" in message:
                    self._finished = self._once
        except ConnectionLost:
            self._release()

    def _end_lane(self, number: int) -> None:
        """Kill a lane that the controller has given up, and report how it ended."""
        self._end_requested.add(number)
        for fd, (lane, pid) in self._lanes.items():
            # A pidfd that is readable belongs to a process that has ended by itself already.
            has_ended = bool(select.select([fd], [], [], 0)[0])
            if lane == number and not has_ended:
                self._killed.add(number)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self._report_end(number)

    def _report_end(self, number: int) -> None:
        """Report how a lane ended, if it has ended and the controller has requested its end."""
        if self._controller and number in self._lane_exits and number in self._end_requested:
            report = {
                "lane": number,
                "ended": self._lane_exits[number],
                "killed": number in self._killed,
            }
            self._controller.stream.send(report)

    def _release(self) -> None:
        """End everything that was done for a controller."""
        if self._controller:
            self._controller.stream.close()
        self._controller = None
        for fd, (_, pid) in self._lanes.items():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(fd)
        self._lanes.clear()
        self._lane_exits.clear()
        self._end_requested.clear()
        self._killed.clear()
        kill_children(spare=self._store_process)
        for folder in self._folder.glob("run-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _collect_lane(self, pidfd: int) -> None:
        """Keep the exit status of a lane that has ended, and kill processes of its subject."""
        number, pid = self._lanes.pop(pidfd)
        os.close(pidfd)
        self._lane_exits[number] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        lanes = {pid for _, pid in self._lanes.values()}
        kill_children(spare=self._store_process | lanes)
        with contextlib.suppress(ConnectionLost):
            self._report_end(number)

    def _fork_lane(self, stream: Stream, message: dict[str, Any]) -> None:
        """Fork a lane that serves a connection."""
        require_one_thread()
        parent = os.getpid()
        if pid := os.fork():
            stream.close()
            self._lanes[os.pidfd_open(pid)] = (int(message.get("lane", 0)), pid)
            return
        status = 1
        try:
            # A process group of its own: a subject that kills the lane's group does not kill the
            # host.
            os.setpgid(0, 0)
            if die_with_parent() != parent:
                os._exit(1)
            for stop in (signal.SIGTERM, signal.SIGINT):
                signal.signal(stop, signal.SIG_DFL)
            self._listener.close()
            if self._controller:
                self._controller.stream.close()
            for pending in self._pending.values():
                pending.close()
            for fd in self._lanes:
                os.close(fd)
            adopt_orphans()
            _serve_lane(stream, self._folder)
            status = 0
        finally:
            os._exit(status)


class _RemoteController(Controller):
    """A controller on another machine.

    It sends a message to stop a run, and another one to permit that ranks are killed, when all
    hosts have collected evidence.
    """

    events = select.POLLIN | select.POLLRDHUP

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.fileno())
        self._stream = stream

    @property
    def has_message(self) -> bool:
        return self._stream.has_message

    def stop_reason(self) -> str | None:
        try:
            if not self._stream.has_message:
                self._stream.read()
            message = self._stream.next_message() or {}
        except ConnectionLost as error:
            raise ControllerGone from error
        return str(message["stop"]) if message.get("stop") else None

    def confirm_kill(self, reason: str) -> None:
        try:
            self._stream.send({"evidence": reason})
            while "kill" not in self._stream.receive(HANDSHAKE):
                pass
        except ConnectionLost as error:
            raise ControllerGone from error


def _waiting_line(host: Announcement) -> str:
    """Return the line that a host prints when it is ready."""
    address, port = host.store
    return (
        f"conformance: host {host.host_rank + 1} of {host.host_count}, {host.node_name}, "
        "waits for a controller: "
        f"--attach with torchrun's --rdzv-endpoint, or {address}:{port}"
    )


def _fork_store(address: str, port: int) -> int:
    """Fork a process that keeps the store in which hosts and ranks meet, and return its pid.

    The first host does so if torchrun's agents share no store.
    """
    require_one_thread()
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        if die_with_parent() == parent:
            from torch.distributed import TCPStore

            store = TCPStore(address, port, is_master=True, wait_for_workers=False)
            while store:
                signal.pause()
    finally:
        os._exit(1)


def _serve_lane(stream: Stream, base: Path) -> None:
    """Carry out commands until the controller hangs up."""
    with contextlib.suppress(ControllerGone, ConnectionLost):
        stream.send({"ready": True})
        while True:
            command = stream.receive(None)
            if "op" not in command:
                # A request to stop a run that had ended already.
                continue
            folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
            try:
                _carry_out(command, stream, folder)
            except OSError as error:
                reason = error.strerror or error
                stream.send({"kit_error": f"{reason}: {error.filename or folder}"})
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _carry_out(command: dict[str, Any], stream: Stream, folder: Path) -> None:
    """Carry out one command, and send the answer."""
    command = {**command, "folder": str(folder), "cwd": os.getcwd()}
    if command["op"] == "run":
        _carry_out_run(command, stream, folder)
        return
    answer = OPERATIONS[command["op"]](command, Controller(stream.fileno()))
    stream.send({"answer": answer})


def _carry_out_run(command: dict[str, Any], stream: Stream, folder: Path) -> None:
    """Run this host's ranks of a run, and send their outcome and their records."""
    scenario = command["scenario"]
    resume = scenario["resume"]
    if resume["saved_in"]:
        # The files that an earlier run saved are on the controller's machine, and come with the
        # command.
        saved = folder / "saved"
        ranks = range(command["world"])
        for rank in ranks:
            (saved / str(rank)).mkdir(parents=True)
        stream.receive_files(command, saved, ranks, SAVED)
        scenario = {**scenario, "resume": {**resume, "saved_in": str(saved)}}
    (folder / MEETING).write_text(json.dumps(command["meeting"]))
    outcome = run_ranks({**command, "scenario": scenario}, _RemoteController(stream))
    saves = bool(resume["saves_at"]) and not resume["resumes"]
    names = RECORDS + SAVED if saves else RECORDS
    files = [(rank, folder / str(rank) / name) for rank in command["ranks"] for name in names]
    stream.send({"outcome": outcome}, files)


def _listen(address: str | None) -> socket.socket:
    """Listen on an address; None means all addresses, IPv6 included if the machine has it."""
    if address is None and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=MAX_PENDING
        )
    return socket.create_server((address or "", 0), backlog=MAX_PENDING)


def _addresses() -> tuple[str, ...]:
    """Return the names under which this machine may be reached, the best first.

    The best is the address of the interface that leads to the rendezvous.
    """
    hostname = socket.gethostname()
    names = [hostname, socket.getfqdn()]
    with contextlib.suppress(OSError):
        store = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with socket.create_connection(store, timeout=10) as connection:
            names.insert(0, connection.getsockname()[0])
    return tuple(dict.fromkeys(names))


def _make_folder() -> Path:
    """Make this host's folder, and remove folders of hosts that were killed before they could."""
    parent = Path(fast_folder() or tempfile.gettempdir())
    for lock in parent.glob(f"{_FOLDER_PREFIX}*/lock"):
        with contextlib.suppress(OSError), open(lock) as file:
            # This succeeds once the host and all processes below it have ended.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    # The folder gets its final name when it is locked, so that no other host removes it before.
    made = Path(tempfile.mkdtemp(prefix=f"new-{_FOLDER_PREFIX}", dir=parent))
    # The descriptor stays open, here and in the processes that are forked from this one.
    lock_file = os.open(made / "lock", os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock_file, fcntl.LOCK_EX)
    return made.rename(parent / made.name.removeprefix("new-"))
