"""The controller's end of a host: starts it, gives runs to its lanes, and survives their deaths.

This module imports no torch.
"""

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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conformance.errors import KitError
from conformance.hosts.environment import describe_exit, fast_folder, host_command
from conformance.hosts.fair_clock import SLOWEST
from conformance.hosts.memory import host_environment
from conformance.records.files import OUTCOME, write_json
from conformance.scenarios.environment import KIT_ENVIRONMENT
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.subjects.spec import SubjectSpec

PATIENCE = 60.0  # seconds beyond the latest end of a run in which the lane itself must answer
STARTUP = 180.0  # seconds for the host to import its modules
REPORT = 5.0  # seconds for the host to report how a lane ended, or to end itself
SHUTDOWN = 5.0  # seconds in which a host must end after its controller hung up
LANES = min(4, os.cpu_count() or 1)


class HostDied(Exception):
    """The process above the ranks is gone; ``str(error)`` is how it ended."""


class HostSilent(HostDied):
    """The process above the ranks still exists, and does not answer."""

    def __init__(self) -> None:
        super().__init__("it did not answer")


class _Lane:
    """A connection to a lane, a process of the host's that carries out one run at a time."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self._connection = connection
        self._buffer = b""

    def request(self, command: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Send a command and return the answer; None if the lane hung up.

        Raises:
            HostSilent: there was no answer in time.
        """
        try:
            self._connection.sendall((json.dumps(command) + "\n").encode())
            while b"\n" not in self._buffer:
                if not select.select([self._connection], [], [], seconds)[0]:
                    raise HostSilent
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
    """Runs scenarios on ranks of this machine.

    A pool is a context manager; after it no process and no file is left. ``run`` may be called from
    as many threads as there are lanes; more threads wait their turn.

    Args:
        deadline: seconds after which the ranks of a run count as hanging; a run takes about 0.2.
        lanes: the number of runs that may go on at the same time.
        hash_seed: Python's PYTHONHASHSEED for the ranks. All ranks of one host hash strings alike;
            those of a cluster do not.
    """

    capacity = None

    def __init__(self, deadline: float, lanes: int = LANES, hash_seed: int = 1) -> None:
        self.deadline = deadline
        self.lanes = lanes
        self.interruptions: list[str] = []
        self._hash_seed = hash_seed
        self._other_hash_seed_pool: Pool | None = None
        # The folder of the runs; it is made with the host, which removes it if the controller is
        # killed.
        self._base = Path()
        self._host: subprocess.Popen[bytes] | None = None
        self._greeting: dict[str, Any] | None = None
        self._lane_pids: dict[int, int] = {}
        self._lane_exits: dict[int, int] = {}
        self._open_lanes: list[_Lane] = []
        self._free_lanes: queue.LifoQueue[_Lane] = queue.LifoQueue()
        self._lane_numbers = itertools.count()
        self._folder_numbers = itertools.count(1)
        self._ping_numbers = itertools.count(1)
        self._last_pong = 0
        # Held while the host is started, or its packets are read.
        self._lock = threading.RLock()
        self._closed = False

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the host without waiting for it: it imports torch while the caller goes on."""
        with self._lock:
            if self._host is None:
                self._start_host()
                for _ in range(self.lanes):
                    self._free_lanes.put(self._new_lane())

    def prepare(self, scenarios: Iterable[Scenario]) -> None:
        """Start, without waiting for it, what runs of these scenarios need beside the host.

        Hosts import torch on one core each, and the caller has ended its own imports.
        """
        if any(one.other_hash_seed or one.hash_seeds_differ for one in scenarios):
            self._start_other_hash_seed_pool().start()

    def greeting(self) -> dict[str, Any]:
        """Return the host's description of this machine; wait for the host if it is not ready.

        Raises:
            KitError: the host cannot import torch.
        """
        self.start()
        with self._lock:
            if not self._read_packets(lambda: self._greeting is not None, STARTUP):
                raise KitError(
                    f"the host did not start ({self._describe_host_end()}); "
                    f"is torch installed for {sys.executable}?"
                )
            assert self._greeting is not None
            return self._greeting

    def describe(self, subject: SubjectSpec, profile: Profile = GLOO_CPU) -> dict[str, Any]:
        """Import the subject in a forked process; if that fails, the answer has ``error``."""
        command = {"op": "describe", "subject": subject.to_json(), "imports": profile.imports}
        return self._request_once(command, profile, "importing it")

    def probe_profile(self, profile: Profile) -> dict[str, Any]:
        """Probe the backend and the devices of a profile (``profile_check.probe_profile``)."""
        command = {"op": "probe_profile", "profile": asdict(profile)}
        return self._request_once(command, profile, "looking for it")

    def _request_once(
        self, command: dict[str, Any], profile: Profile, activity: str
    ) -> dict[str, Any]:
        """Send a command that is no run, with a folder that is removed afterwards."""
        folder = self._new_folder(command["op"])
        try:
            command = {**command, "folder": str(folder)}
            return self._request(command, self.deadline + profile.startup)
        except HostSilent:
            return {"error": f"the process above it did not answer while {activity}"}
        except HostDied as error:
            return {"error": f"{activity} killed the process above it ({error})"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Path:
        """Run a scenario; return the folder of its records, which includes ``outcome.json``.

        Raises:
            KitError: the machine lacks disk space or processes for the run, or the pool was closed.
        """
        if scenario.other_hash_seed:
            scenario = replace(scenario, other_hash_seed=False)
            return self._start_other_hash_seed_pool().run(scenario, world, subject, name)
        folder = self._new_folder(name)
        deadline = min(self.deadline, scenario.deadline or self.deadline) + scenario.profile.startup
        command = {
            "op": "run",
            "scenario": scenario.to_json(),
            "world": world,
            "subject": subject.to_json() if subject else None,
            "folder": str(folder),
        }
        in_both = scenario.hash_seeds_differ and world > 1
        request = self._request_of_both_pools if in_both else self._request
        try:
            outcome = request(command, deadline, scenario.patience)
        except HostDied as error:
            stopped = "silent" if isinstance(error, HostSilent) else "host"
            outcome = {"stopped": stopped, "host": str(error), "left_processes": [], "ranks": []}
        if "kit_error" in outcome:
            raise KitError(f"cannot run {name}: {outcome['kit_error']}")
        write_json(folder / OUTCOME, outcome)
        return folder

    def _start_other_hash_seed_pool(self) -> "Pool":
        """Return a pool whose host has another hash seed; it is made on first use."""
        with self._lock:
            if self._closed:
                raise KitError("the pool was closed")
            if self._other_hash_seed_pool is None:
                self._other_hash_seed_pool = Pool(self.deadline, self.lanes, self._hash_seed + 1)
            return self._other_hash_seed_pool

    def close(self) -> None:
        """Stop the host and everything below it, and remove its files."""
        with self._lock:
            self._closed = True
            if self._other_hash_seed_pool:
                self._other_hash_seed_pool.close()
            for lane in self._open_lanes:
                lane.hang_up()
            if self._host is not None and self._control.fileno() >= 0:
                ready = self._read_packets(lambda: self._greeting is not None, 0)
                self._control.close()
                if not ready:
                    # It still imports torch, and has forked nothing.
                    self._host.kill()
                try:
                    self._host.wait(timeout=SHUTDOWN)
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
                # Without its parents: the folder of a closed pool does not come back.
                folder.mkdir()
            except FileExistsError:
                folder = self._base / f"{name}-{next(self._folder_numbers)}"
                folder.mkdir()
        except OSError as error:
            raise KitError(f"cannot create {folder}: {error.strerror}") from error
        return folder

    def _request(
        self, command: dict[str, Any], deadline: float, patience: float = 0.0
    ) -> dict[str, Any]:
        """Send a command to a free lane and return its answer.

        Args:
            command: the command.
            deadline: seconds after which the lane stops what it does.
            patience: more seconds that the lane may take if the deadline begins anew.

        Raises:
            HostDied: the lane, or the host above it, died.
            HostSilent: it did not answer.
        """
        self.greeting()
        return self._carry_out(self._free_lanes.get(), command, deadline, patience)

    def _request_of_both_pools(
        self, command: dict[str, Any], deadline: float, patience: float
    ) -> dict[str, Any]:
        """Let ranks with even numbers run here, and the others in processes with another hash seed.

        The arguments and the exceptions are those of :meth:`_request`.
        """
        pools = self._start_other_hash_seed_pool(), self
        for pool in pools:
            pool.greeting()
        # Always in this order, so that no two runs wait for each other; and both before either is
        # used, so that no rank waits for a peer whose lane is busy.
        lanes = [pool._free_lanes.get() for pool in pools]
        ranks_of_pools = _odd_and_even(command["world"])
        with ThreadPoolExecutor(len(pools)) as threads:
            parts = [
                threads.submit(
                    pool._carry_out, lane, {**command, "ranks": ranks}, deadline, patience
                )
                for pool, lane, ranks in zip(pools, lanes, ranks_of_pools, strict=True)
            ]
        return _merged([part.result() for part in parts])

    def _carry_out(
        self, lane: _Lane, command: dict[str, Any], deadline: float, patience: float
    ) -> dict[str, Any]:
        """Send a command to a lane, return its answer, and put the lane back."""
        command = {**command, "cwd": os.getcwd(), "deadline": deadline}
        try:
            answer = lane.request(command, SLOWEST * deadline + patience + PATIENCE)
            if answer is None:
                raise HostDied(self._describe_lane_end(lane))
            if not self._is_host_alive():
                host_end = self._describe_host_end()
                if self._is_host_running():
                    raise HostSilent
                raise HostDied(f"{host_end}, above the one that forked them")
            return answer
        except HostDied:
            lane = self._replace_lane(lane)
            raise
        finally:
            self._free_lanes.put(lane)

    def _is_host_alive(self) -> bool:
        """Whether the host answers.

        A host that was killed may still exist for a moment, so its process is not proof enough.
        """
        with self._lock, contextlib.suppress(OSError):
            number = next(self._ping_numbers)
            self._control.send(json.dumps({"ping": number}).encode())
            return self._read_packets(lambda: self._last_pong >= number, PATIENCE)
        return False

    def _is_host_running(self) -> bool:
        return self._host is not None and self._host.poll() is None

    def _start_host(self) -> None:
        if self._base == Path():
            prefix = f"conformance-{os.getpid()}-"
            self._base = Path(tempfile.mkdtemp(prefix=prefix, dir=fast_folder()))
        self._control, host_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hash_seed = {"PYTHONHASHSEED": str(self._hash_seed)}
        environment = host_environment({**os.environ, **KIT_ENVIRONMENT, **hash_seed})
        # The level DETAIL crashes DDP in torch 2.13.
        environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
        try:
            self._host = subprocess.Popen(
                host_command(str(host_end.fileno()), str(self._base)),
                pass_fds=[host_end.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise KitError(f"cannot start the host: {error}") from error
        host_end.close()
        self._greeting = None

    def _new_lane(self) -> _Lane:
        """Request a lane; the packet waits in the host's queue until it has imported torch."""
        connection, lane_end = socket.socketpair()
        lane = _Lane(next(self._lane_numbers), connection)
        packet = json.dumps({"lane": lane.number}).encode()
        with contextlib.suppress(OSError), lane_end:
            socket.send_fds(self._control, [packet], [lane_end.fileno()])
        self._open_lanes.append(lane)
        return lane

    def _replace_lane(self, lane: _Lane) -> _Lane:
        """Return a fresh lane in place of one that died or does not answer.

        If the host has ended, another host is started first.
        """
        with self._lock:
            lane.hang_up()
            if self._closed:
                raise KitError("the pool was closed")
            self._open_lanes.remove(lane)
            self._kill_lane(lane.number)
            if self._host is not None and self._host.poll() is not None:
                self._control.close()
                self._start_host()
                self.greeting()
            return self._new_lane()

    def _kill_lane(self, number: int) -> None:
        """Kill the process of a lane if it is known and has not ended."""
        if number in self._lane_pids and number not in self._lane_exits:
            with contextlib.suppress(OSError):
                os.kill(self._lane_pids[number], signal.SIGKILL)

    def _read_packets(self, until: Callable[[], bool], seconds: float) -> bool:
        """Read the host's packets until a condition holds.

        Returns:
            False if the host ended, or sent nothing for so many seconds, before the condition held.
        """
        while not until():
            try:
                ready = select.select([self._control], [], [], seconds)[0]
                packet = self._control.recv(1 << 16) if ready else b""
            except OSError:
                return False
            if not packet:
                return False
            message = json.loads(packet)
            if "greeting" in message:
                self._greeting = message["greeting"]
            elif "pong" in message:
                self._last_pong = message["pong"]
            elif "ended" in message:
                self._lane_exits[message["lane"]] = message["ended"]
            else:
                self._lane_pids[message["lane"]] = message["pid"]
        return True

    def _describe_lane_end(self, lane: _Lane) -> str:
        """Return how a lane ended; if the host cannot report it, how the host ended."""
        with self._lock:
            reported = not self._closed and self._read_packets(
                lambda: lane.number in self._lane_exits, REPORT
            )
            if not reported:
                return self._describe_host_end()
            return describe_exit(self._lane_exits[lane.number])

    def _describe_host_end(self) -> str:
        assert self._host is not None
        try:
            return describe_exit(self._host.wait(timeout=REPORT))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def _kill_everything(self) -> None:
        assert self._host is not None
        for number in self._lane_pids:
            self._kill_lane(number)
        self._host.kill()
        self._host.wait()


def _odd_and_even(world: int) -> tuple[list[int], list[int]]:
    return list(range(1, world, 2)), list(range(0, world, 2))


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the outcome of a run from those of its parts, which had different ranks."""
    for part in parts:
        if "kit_error" in part:
            return part
    ranks = sorted(itertools.chain(*(part["ranks"] for part in parts)), key=lambda r: r["rank"])
    stopped = [part["stopped"] for part in parts if part["stopped"] != "ended"]
    # A part does not know that a rank of another one has died.
    if "hang" in stopped and any(rank["exit"] and not rank.get("killed") for rank in ranks):
        stopped = ["peer"]
    left = list(itertools.chain(*(part["left_processes"] for part in parts)))
    return {"stopped": [*stopped, "ended"][0], "left_processes": left, "ranks": ranks}
