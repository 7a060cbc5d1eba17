"""The controller's end of the host: starts it, gives runs to its lanes, survives their deaths. Imports no torch."""

import contextlib
import itertools
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conformance.errors import KitError
from conformance.hosts.environment import ENVIRONMENT, PACKAGE, fast_folder, in_words
from conformance.hosts.memory import for_host
from conformance.records.files import OUTCOME, write_json
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.subjects.spec import SubjectSpec

PATIENCE = 60.0  # seconds beyond the deadline in which the lane itself must answer
PARTING = 5.0  # seconds in which a host whose controller hung up must have ended
LANES = min(4, os.cpu_count() or 1)


class HostDied(Exception):
    """The process above the ranks is gone; ``str(error)`` says how it ended."""


class _Lane:
    """One connection to a process of the host's that carries out one run at a time."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self._connection, self._buffer = number, connection, b""

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Send a command and return the answer; None when the lane hung up.

        Raises:
            HostDied: there was no answer in time.
        """
        try:
            self._connection.sendall((json.dumps(command) + "\n").encode())
            while b"\n" not in self._buffer:
                if not select.select([self._connection], [], [], seconds)[0]:
                    raise HostDied("it did not answer")
                chunk = self._connection.recv(1 << 20)
                if not chunk:
                    return None
                self._buffer += chunk
        except OSError:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Pool:
    """Runs scenarios on ranks of this machine. A context manager: leaving it leaves nothing behind.

    ``run`` may be called from as many threads as there are lanes; more wait their turn.

    Args:
        deadline: seconds that one run may take before its ranks are taken to hang; a run takes about 0.2.
        lanes: runs that may go on at the same time.
        hashes: what strings are hashed with, see Python's PYTHONHASHSEED: forked processes all hash alike, those of a cluster do not.
    """

    capacity = None

    def __init__(self, deadline: float, lanes: int = LANES, hashes: int = 1) -> None:
        self.deadline, self.lanes, self._hashes = deadline, lanes, hashes
        self._elsewhere: Pool | None = None
        self.interruptions: list[str] = []
        self._base = Path()  # made with the host, which removes it should this process be killed
        self._host: subprocess.Popen[bytes] | None = None
        self._greeting: dict[str, Any] | None = None
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._all: list[_Lane] = []
        self._free: queue.LifoQueue[_Lane] = queue.LifoQueue()
        self._numbers, self._runs, self._pings = itertools.count(), itertools.count(1), itertools.count(1)
        self._pong = 0
        self._lock = threading.RLock()  # over the host and what it says
        self._closed = False

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the host, without waiting for it: it imports torch while the caller goes on."""
        with self._lock:
            if self._host is None:
                self._start_host()
                for _ in range(self.lanes):
                    self._free.put(self._new_lane())

    def greeting(self) -> dict[str, Any]:
        """Return what the host said of this machine, once it is ready.

        Raises:
            KitError: the host cannot import torch.
        """
        self.start()
        with self._lock:
            if not self._listen(lambda: self._greeting is not None, 180.0):
                raise KitError(f"the host did not start ({self._how_the_host_ended()}); is torch installed for {sys.executable}?")
            assert self._greeting is not None
            return self._greeting

    def describe(self, subject: SubjectSpec, profile: Profile = GLOO_CPU) -> dict[str, Any]:
        """Import the subject in a forked process; the answer has ``error`` when that fails."""
        command = {"op": "describe", "subject": subject.to_json(), "imports": profile.imports}
        return self._ask_in_passing(command, self.deadline + profile.startup, "importing it")

    def look(self, profile: Profile) -> dict[str, Any]:
        """Find out in a forked process what the machine has for a profile, see ``machine.look``."""
        return self._ask_in_passing({"op": "look", "profile": asdict(profile)}, self.deadline + profile.startup, "looking for it")

    def _ask_in_passing(self, command: dict[str, Any], deadline: float, what: str) -> dict[str, Any]:
        folder = self._new_folder(command["op"])
        try:
            return self._ask({**command, "folder": str(folder)}, deadline)
        except HostDied as error:
            return {"error": f"{what} killed the process above it ({error})"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Path:
        """Run a scenario and return the folder of its records, with ``outcome.json`` in it.

        Raises:
            KitError: the run could not be carried out for want of disk or processes, or the pool was closed.
        """
        if scenario.other_hash_seed:
            return self._pool_elsewhere().run(replace(scenario, other_hash_seed=False), world, subject, name)
        folder = self._new_folder(name)
        command = {"op": "run", "scenario": scenario.to_json(), "world": world, "subject": subject.to_json() if subject else None}
        try:
            deadline = min(self.deadline, scenario.deadline or self.deadline) + scenario.profile.startup
            outcome = self._ask({**command, "folder": str(folder)}, deadline)
        except HostDied as error:
            outcome = {"stopped": "host", "host": str(error), "left_processes": [], "ranks": []}
        if "kit_error" in outcome:
            raise KitError(f"cannot run {name}: {outcome['kit_error']}")
        write_json(folder / OUTCOME, outcome)
        return folder

    def _pool_elsewhere(self) -> "Pool":
        """Return a pool of another host, which hashes strings otherwise; it is started when it is first asked for."""
        with self._lock:
            if self._closed:
                raise KitError("the pool was closed")
            self._elsewhere = self._elsewhere or Pool(self.deadline, self.lanes, self._hashes + 1)
            return self._elsewhere

    def close(self) -> None:
        """Stop the host with everything below it, and remove what it left on disk."""
        with self._lock:
            self._closed = True
            if self._elsewhere:
                self._elsewhere.close()
            for lane in self._all:
                lane.hang_up()
            if self._host is not None:
                self._control.close()
                try:
                    self._host.wait(timeout=PARTING)
                except subprocess.TimeoutExpired:
                    self._kill_everything()
        if self._base != Path():
            shutil.rmtree(self._base, ignore_errors=True)

    def _new_folder(self, name: str) -> Path:
        self.start()
        if self._closed:
            raise KitError("the pool was closed")
        folder = self._base / name
        try:
            try:
                folder.mkdir()  # not its parents: a closed pool's folder stays away
            except FileExistsError:
                folder = self._base / f"{name}-{next(self._runs)}"
                folder.mkdir()
        except OSError as error:
            raise KitError(f"cannot create {folder}: {error.strerror}") from error
        return folder

    def _ask(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        self.greeting()
        lane = self._free.get()
        try:
            answer = lane.ask({**command, "cwd": os.getcwd(), "deadline": deadline}, deadline + PATIENCE)
            if answer is None:
                raise HostDied(self._how_it_ended(lane))
            if not self._host_lives():
                raise HostDied(f"{self._how_the_host_ended()}, above the one that forked them")
            return answer
        except HostDied:
            lane = self._replace(lane)
            raise
        finally:
            self._free.put(lane)

    def _host_lives(self) -> bool:
        """Whether the host answers. One that was killed does not, though it may be a moment in ending."""
        with self._lock, contextlib.suppress(OSError):
            number = next(self._pings)
            self._control.send(json.dumps({"ping": number}).encode())
            return self._listen(lambda: self._pong >= number, PATIENCE)
        return False

    def _start_host(self) -> None:
        if self._base == Path():
            self._base = Path(tempfile.mkdtemp(prefix=f"conformance-{os.getpid()}-", dir=fast_folder()))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = for_host({**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": str(self._hashes)})
        environment.pop("TORCH_DISTRIBUTED_DEBUG", None)  # DETAIL crashes DDP in torch 2.13
        command = [sys.executable, "-P", str(PACKAGE / "host.py"), str(theirs.fileno()), str(self._base)]
        try:
            self._host = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise KitError(f"cannot start the host: {error}") from error
        theirs.close()
        self._greeting = None

    def _new_lane(self) -> _Lane:
        """Ask the host for a lane; the request waits in its queue until it has imported torch."""
        ours, theirs = socket.socketpair()
        lane = _Lane(next(self._numbers), ours)
        with contextlib.suppress(OSError), theirs:
            socket.send_fds(self._control, [json.dumps({"lane": lane.number}).encode()], [theirs.fileno()])
        self._all.append(lane)
        return lane

    def _replace(self, lane: _Lane) -> _Lane:
        """Put a fresh lane in the place of one that is gone or no longer answers; start another host if it takes that."""
        with self._lock:
            lane.hang_up()
            if self._closed:
                raise KitError("the pool was closed")
            self._all.remove(lane)
            if lane.number not in self._ended and lane.number in self._pids:
                with contextlib.suppress(OSError):
                    os.kill(self._pids[lane.number], signal.SIGKILL)
            if self._host is not None and self._host.poll() is not None:
                self._control.close()
                self._start_host()
                self.greeting()
            return self._new_lane()

    def _listen(self, until: Callable[[], bool], seconds: float) -> bool:
        """Take in what the host says until something is known; false when it said no such thing before it ended."""
        while not until():
            try:
                ready = select.select([self._control], [], [], seconds)[0]
                packet = self._control.recv(1 << 16) if ready else b""
            except OSError:
                return False
            if not packet:
                return False
            said = json.loads(packet)
            if "greeting" in said:
                self._greeting = said["greeting"]
            elif "pong" in said:
                self._pong = said["pong"]
            else:
                (self._ended if "ended" in said else self._pids)[said["lane"]] = said.get("ended", said.get("pid"))
        return True

    def _how_it_ended(self, lane: _Lane) -> str:
        with self._lock:
            if self._closed or not self._listen(lambda: lane.number in self._ended, 5.0):
                return self._how_the_host_ended()
            return in_words(self._ended[lane.number])

    def _how_the_host_ended(self) -> str:
        assert self._host is not None
        try:
            return in_words(self._host.wait(timeout=5))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def _kill_everything(self) -> None:
        assert self._host is not None
        for number, pid in self._pids.items():
            if number not in self._ended:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self._host.kill()
        self._host.wait()
