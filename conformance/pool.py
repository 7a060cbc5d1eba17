"""The controller's end of the host: starts it, asks it to run scenarios, survives its death."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conformance.errors import KitError
from conformance.record import OUTCOME, write_json
from conformance.scenario import Scenario
from conformance.subject import SubjectSpec

PACKAGE = Path(__file__).resolve().parent
PATIENCE = 60.0  # seconds beyond the deadline in which the host itself must answer


class HostDied(Exception):
    """The host is gone; ``str(error)`` says how it ended."""


class Pool:
    """Runs scenarios on ranks of this machine. A context manager: leaving it leaves nothing behind.

    Args:
        deadline: seconds that one run may take before its ranks are taken to hang; a run takes about 0.2.
        keep: folder in which the runs' records stay; None removes each as soon as it is read.
    """

    def __init__(self, deadline: float, keep: Path | None = None) -> None:
        self.deadline = deadline
        self._keep = keep
        self._base = Path()  # made with the host, which removes it should this process be killed
        self._process: subprocess.Popen[bytes] | None = None
        self._greeting: dict[str, Any] | None = None
        self._runs = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the host, without waiting for it: it imports torch while the caller goes on."""
        if self._process is not None:
            return
        if self._base == Path():
            self._base = Path(tempfile.mkdtemp(prefix="conformance-", dir=_fast_folder()))
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **_ENVIRONMENT}
        environment.pop("TORCH_DISTRIBUTED_DEBUG", None)  # DETAIL crashes DDP in torch 2.13
        command = [sys.executable, "-P", str(PACKAGE / "host.py"), str(theirs.fileno()), str(self._base)]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise KitError(f"cannot start the host: {error}") from error
        theirs.close()
        self._socket, self._buffer, self._greeting = ours, b"", None

    def greeting(self) -> dict[str, Any]:
        """Return what the host said of this machine, once it is ready.

        Raises:
            KitError: the host cannot import torch.
        """
        self.start()
        if self._greeting is None:
            try:
                self._greeting = self._receive(180.0)
            except HostDied as error:
                raise KitError(f"the host did not start ({error}); is torch installed for {sys.executable}?") from error
        return self._greeting

    def describe(self, subject: SubjectSpec) -> dict[str, Any]:
        """Import the subject in a forked process; the answer has ``error`` when that fails."""
        folder = self._new_folder("describe")
        try:
            return self._ask({"op": "describe", "subject": subject.to_json(), "folder": str(folder)}, self.deadline)
        except HostDied as error:
            self._restart()
            return {"error": f"importing it killed the process above it ({error})"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Path:
        """Run a scenario and return the folder of its records, with ``outcome.json`` in it.

        Raises:
            KitError: the run could not be carried out for want of disk or processes.
        """
        folder = self._new_folder(name)
        command = {"op": "run", "scenario": scenario.to_json(), "world": world, "subject": subject.to_json() if subject else None}
        try:
            outcome = self._ask({**command, "folder": str(folder)}, self.deadline)
        except HostDied as error:
            self._restart()
            outcome = {"stopped": "host", "host": str(error), "left_processes": [], "ranks": []}
        if "kit_error" in outcome:
            raise KitError(f"cannot run {name}: {outcome['kit_error']}")
        write_json(folder / OUTCOME, outcome)
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a run's folder, unless records are kept."""
        if self._keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            for rest in ("tmp", "ask", "stacks.txt", "flight.json"):
                for path in folder.glob(f"*/{rest}"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            (folder / "store").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                shutil.copytree(folder, self._keep / folder.name, dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Stop the host with everything below it, and remove what it left on disk."""
        self._stop()
        if self._base != Path():
            shutil.rmtree(self._base, ignore_errors=True)

    def _new_folder(self, name: str) -> Path:
        self.start()
        self._runs += 1
        folder = self._base / name
        if folder.exists():
            folder = self._base / f"{name}-{self._runs}"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise KitError(f"cannot create {folder}: {error.strerror}") from error
        return folder

    def _ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.greeting()
        line = json.dumps({**command, "cwd": os.getcwd(), "deadline": seconds}) + "\n"
        try:
            self._socket.sendall(line.encode())
        except OSError as error:
            raise HostDied(self._how_it_ended()) from error
        return self._receive(seconds + PATIENCE)

    def _receive(self, seconds: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            if not select.select([self._socket], [], [], seconds)[0]:
                raise HostDied("it did not answer")
            try:
                chunk = self._socket.recv(1 << 20)
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise HostDied(self._how_it_ended())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def _restart(self) -> None:
        self._stop()
        self.start()

    def _stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._socket.close()
        self._process = None


_ENVIRONMENT = {
    # One thread per rank: torch's default makes a check 12 to 24 times slower on two cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_FR_BUFFER_SIZE": "256",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONUNBUFFERED": "1",
}


def _fast_folder() -> str | None:
    """/dev/shm where it can be written; else the usual temporary folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
