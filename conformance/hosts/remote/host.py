"""The host that torchrun starts: one for each slot, which forks the rank that a run has there.

It is the host of ``host.py`` with another way in. torchrun starts it, watches it and starts it anew; it says in the rendezvous
store where it listens, and a controller connects: once to tell it what to do, and once for each lane. Whoever connects must know
the token from the store. One controller is served at a time; when it leaves, or its machine no longer answers, its ranks are
killed, its folders removed, and the host waits for the next one. The host dies with torchrun's agent, lanes with the host, ranks
with their lane.
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
from pathlib import Path
from typing import Any

from conformance.hosts.environment import ENVIRONMENT, PACKAGE, fast_folder
from conformance.hosts.memory import for_host
from conformance.hosts.operations import OPERATIONS, keep_bytecode, run_here, warm_up
from conformance.hosts.remote.rendezvous import announce, announcement, kit_digest
from conformance.hosts.remote.wire import RECORDS, SAVED, ConnectionLost, Stream
from conformance.hosts.supervisor import Controller, ControllerGone, adopt_orphans, die_with_parent, kill_children, require_one_thread
from conformance.records.files import MEETING

HANDSHAKE = 30.0  # seconds in which a controller must have said that evidence is complete everywhere
HELLO_LIMIT = 1 << 16  # bytes that one may send before it has said what it is
WAITING = 32  # connections that have not yet said what they are
_FOLDER = "conformance-slot-"


def start_anew(arguments: list[str]) -> None:
    """Put the host in this process's place, as a pool starts it: no current folder on the path, and an environment for ranks."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        sys.exit("conformance.host is started by torchrun: torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d "
                 "--rdzv-endpoint=HOST:PORT -m conformance.host")  # fmt: skip
    if unknown := [argument for argument in arguments if argument != "--once"]:
        sys.exit(f"conformance.host: {unknown[0]} is no option of it; there is --once, to end when a controller has finished")
    environment = for_host({**os.environ, **ENVIRONMENT})
    if "GLOO_SOCKET_IFNAME" in os.environ or os.environ.get("GROUP_WORLD_SIZE") != "1":
        environment.pop("GLOO_SOCKET_IFNAME")
        environment.update({key: value for key, value in os.environ.items() if key == "GLOO_SOCKET_IFNAME"})
    environment.pop("TORCH_DISTRIBUTED_DEBUG", None)  # DETAIL crashes DDP in torch 2.13
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", str(PACKAGE / "host.py"), "--slot", *arguments], environment)


def serve_slot(arguments: list[str]) -> None:
    """Serve controllers, one after another; with ``--once`` until one has finished."""
    if die_with_parent() == 1:
        return  # torchrun's agent has ended before
    folder = _own_folder()
    try:
        for stop in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop, lambda number, _: sys.exit(128 + number))
        adopt_orphans()
        _Slot(folder, once="--once" in arguments).serve()
    finally:
        kill_children()
        shutil.rmtree(folder, ignore_errors=True)


class _Slot:
    """A host's state: who is connected, and which lanes it has forked.

    Args:
        folder: its own, on a disk of this machine.
        once: end when a controller has finished.
    """

    def __init__(self, folder: Path, once: bool) -> None:
        self._folder, self._once, self._finished = folder, once, False
        self._id, self._token = secrets.token_hex(8), secrets.token_hex(16)
        loopback = os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1")
        self._listener = _listen("127.0.0.1" if loopback else "")
        self._control: Stream | None = None
        self._controller, self._controller_id = "", ""  # who that is, for people and for certain
        self._waiting: dict[int, Stream] = {}  # connected, and not yet said what for
        self._lanes: dict[int, tuple[int, int]] = {}  # pidfd: number, pid
        self._ended: dict[int, int] = {}  # number of a lane: exit status
        self._asked_about: set[int] = set()
        self._killed: set[int] = set()  # of those, lanes that had not ended by themselves
        self._keeper: set[int] = set()  # the process that keeps the store, where this host has to

    def serve(self) -> None:
        """Announce this host, and serve who comes."""
        host = announcement(self._id, self._token, _addresses(), self._listener.getsockname()[1])
        self._greeting = {**warm_up(), "kit": kit_digest(), "id": self._id}
        keep_bytecode(self._folder / "bytecode")
        if host.slot == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._keeper = {_keep_store(*host.store)}
        try:
            announce(host)
        except RuntimeError as error:
            sys.exit(f"conformance: the store of the rendezvous does not answer at {host.store[0]}:{host.store[1]}: {error}")
        gc.collect()
        gc.freeze()
        address = f"--attach with torchrun's --rdzv-endpoint, or {host.store[0]}:{host.store[1]}"
        print(f"conformance: host {host.slot + 1} of {host.slots}, {host.node_name}, waits for a controller: {address}", flush=True)
        while not self._finished:
            self._wait()

    def _wait(self) -> None:
        """Serve whoever has something to say."""
        poller = select.poll()
        control = [self._control.fileno()] if self._control else []
        for fd in (self._listener.fileno(), *control, *self._waiting, *self._lanes):
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll():
            if fd in self._lanes:
                self._lane_ended(fd)
            elif fd == self._listener.fileno():
                self._accept()
            elif fd in self._waiting:
                self._introduced(fd)
            elif self._control and fd == self._control.fileno():
                self._obey()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            stream = Stream(connection)
            self._waiting[stream.fileno()] = stream
            if len(self._waiting) > WAITING:
                self._waiting.pop(next(iter(self._waiting))).close()

    def _introduced(self, fd: int) -> None:
        """Take a connection for what it says it is; close it where it does not know the token."""
        stream = self._waiting[fd]
        try:
            stream.fill()
            message = stream.pop()
        except ConnectionLost:
            message = {}
        if message is None and stream.held < HELLO_LIMIT:
            return
        message = message or {}
        del self._waiting[fd]
        known = secrets.compare_digest(str(message.get("token")).encode(errors="replace"), self._token.encode())
        if known and message.get("wants") == "control":
            self._take_control(stream, message)
        elif known and message.get("wants") == "lane" and self._control:
            self._fork_lane(stream, message)
        else:
            stream.close()

    def _take_control(self, stream: Stream, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionLost):
            if self._control and message.get("id") != self._controller_id:
                stream.send({"busy": self._controller})
                stream.close()
                return
            self._let_go()
            self._control, self._controller, self._controller_id = stream, str(message.get("who")), str(message.get("id"))
            stream.send({"greeting": self._greeting})

    def _obey(self) -> None:
        """Answer the controller; let go of it when it hangs up."""
        assert self._control is not None
        try:
            self._control.fill()
            while (message := self._control.pop()) is not None:
                if "ping" in message:
                    self._control.send({"pong": message["ping"], "clock": time.monotonic()})
                if "end" in message:
                    self._end_lane(message["end"])
                if "bye" in message:
                    self._finished = self._once
        except ConnectionLost:
            self._let_go()

    def _end_lane(self, number: int) -> None:
        """Kill a lane that its controller has given up, and say how it ended: by this, or before."""
        self._asked_about.add(number)
        for fd, (lane, pid) in self._lanes.items():
            if lane == number and not select.select([fd], [], [], 0)[0]:  # which tells of an end before it is waited for
                self._killed.add(number)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self._say_how_it_ended(number)

    def _say_how_it_ended(self, number: int) -> None:
        if self._control and number in self._ended and number in self._asked_about:
            self._control.send({"lane": number, "ended": self._ended[number], "killed": number in self._killed})

    def _let_go(self) -> None:
        """End what was done for a controller."""
        if self._control:
            self._control.close()
        self._control = None
        for fd, (_, pid) in list(self._lanes.items()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(fd)
        self._lanes, self._ended, self._asked_about, self._killed = {}, {}, set(), set()
        kill_children(spare=self._keeper)
        for folder in self._folder.glob("run-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _lane_ended(self, fd: int) -> None:
        number, pid = self._lanes.pop(fd)
        os.close(fd)
        self._ended[number] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        kill_children(spare=self._keeper | {pid for _, pid in self._lanes.values()})  # what the lane's subject left behind
        with contextlib.suppress(ConnectionLost):
            self._say_how_it_ended(number)

    def _fork_lane(self, stream: Stream, message: dict[str, Any]) -> None:
        """Fork a lane that serves a connection."""
        require_one_thread()
        parent = os.getpid()
        if pid := os.fork():
            stream.close()
            self._lanes[os.pidfd_open(pid)] = int(message.get("lane", 0)), pid
            return
        status = 1
        try:
            os.setpgid(0, 0)
            if die_with_parent() != parent:
                os._exit(1)
            for stop in (signal.SIGTERM, signal.SIGINT):
                signal.signal(stop, signal.SIG_DFL)
            self._listener.close()
            for other in (self._control, *self._waiting.values()):
                if other:
                    other.close()
            for fd in self._lanes:
                os.close(fd)
            adopt_orphans()
            _serve_lane(stream, self._folder)
            status = 0
        finally:
            os._exit(status)


class _Remote(Controller):
    """A controller on another machine: it says when a run is to be stopped, and kills ranks when it has the evidence of all."""

    events = select.POLLIN | select.POLLRDHUP

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.fileno())
        self._stream = stream

    @property
    def pending(self) -> bool:  # type: ignore[override]
        return self._stream.pending

    def says(self) -> str:
        try:
            if not self._stream.pending:
                self._stream.fill()
            message = self._stream.pop() or {}
        except ConnectionLost as error:
            raise ControllerGone from error
        return str(message.get("stop", ""))

    def may_kill(self, reason: str) -> None:
        try:
            self._stream.send({"evidence": reason})
            while "kill" not in self._stream.receive(HANDSHAKE):
                pass
        except ConnectionLost as error:
            raise ControllerGone from error


def _keep_store(address: str, port: int) -> int:
    """Fork a process that keeps the store in which hosts and ranks meet: where torchrun's agents share none, the first host does."""
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
    """Answer commands until the controller hangs up."""
    with contextlib.suppress(ControllerGone, ConnectionLost):
        stream.send({"ready": True})
        while True:
            command = stream.receive(None)
            if "op" not in command:
                continue  # a stop that came too late
            folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
            try:
                _answer(command, stream, folder)
            except OSError as error:
                stream.send({"kit_error": f"{error.strerror or error}: {error.filename or folder}"})
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _answer(command: dict[str, Any], stream: Stream, folder: Path) -> None:
    command = {**command, "folder": str(folder), "cwd": os.getcwd()}
    if command["op"] != "run":
        stream.send({"said": OPERATIONS[command["op"]](command, Controller(stream.fileno()))})
        return
    world, ranks, scenario = command["world"], command["ranks"], command["scenario"]
    if scenario["saved_in"]:
        saved = folder / "saved"
        for rank in range(world):
            (saved / str(rank)).mkdir(parents=True)
        stream.receive_files(command, saved, range(world), SAVED)
        scenario = {**scenario, "saved_in": str(saved)}
    (folder / MEETING).write_text(json.dumps(command["meeting"]))
    outcome = run_here({**command, "scenario": scenario}, _Remote(stream))
    names = RECORDS + (SAVED if scenario["saves_at"] and not scenario["resumes"] else ())
    stream.send({"outcome": outcome}, [(rank, folder / str(rank) / name) for rank in ranks for name in names])


def _listen(address: str) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=WAITING)
    return socket.create_server((address, 0), backlog=WAITING)


def _addresses() -> tuple[str, ...]:
    """Return under what names this machine may be reached: first the address that it has towards the rendezvous."""
    own = socket.gethostname()
    with contextlib.suppress(OSError):
        store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with socket.create_connection(store, timeout=10) as connection:
            own = connection.getsockname()[0]
    return tuple(dict.fromkeys((own, socket.gethostname(), socket.getfqdn())))


def _own_folder() -> Path:
    """Make this host's folder, and remove those of hosts that are no more: they could not."""
    where = Path(fast_folder() or tempfile.gettempdir())
    for lock in where.glob(f"{_FOLDER}*/lock"):
        with contextlib.suppress(OSError), open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its host, and all below it, have ended
            shutil.rmtree(lock.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"new-{_FOLDER}", dir=where))
    fcntl.flock(os.open(made / "lock", os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)  # until the last process has ended
    return made.rename(where / made.name.removeprefix("new-"))
