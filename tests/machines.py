"""Machines made of network namespaces, each with its own interface, address and host name.

All are connected to one switch. A machine that is cut off keeps its link up and receives nothing
any more, as behind a switch that has failed: no packet reports the failure. This needs root and
iproute2; nothing stays behind.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NETNS_FILES = Path("/etc/netns")


@dataclass
class Machine:
    """One machine.

    Attributes:
        name: its host name.
        address: the address of its only interface, ``eth0``.
        namespace: the name of its network namespace.
        port: its port of the switch.
        switch: the namespace of the switch.
    """

    name: str
    address: str
    namespace: str
    port: str
    switch: str

    def start(self, arguments: list[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a program on this machine; the process has the pid of the program."""
        here = [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {self.name}; exec "$@"',
            "sh",
        ]
        return subprocess.Popen([*here, *arguments], text=True, start_new_session=True, **options)

    def kill(self) -> None:
        """Kill all processes at once, as a loss of power does."""
        _end_all(self.namespace)

    def cut_off(self) -> None:
        """Disconnect its port from the switch."""
        _ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def plug_in(self) -> None:
        """Connect its port to the switch again."""
        _ip("-n", self.switch, "link", "set", self.port, "master", "bridge", "up")


def reason_for_none() -> str | None:
    """Return why no such machines can be made here, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "hostname") if not shutil.which(tool)]:
        return f"{' and '.join(missing)} not installed"
    try:
        with machines("try"):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


@contextlib.contextmanager
def machines(*names: str) -> Iterator[list[Machine]]:
    """Make machines that reach each other, by address and by name."""
    switch = f"cf{os.getpid()}switch"
    made: list[Machine] = []
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "name", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            made.append(
                Machine(
                    name, f"10.219.7.{number}", f"cf{os.getpid()}{name}", f"port{number}", switch
                )
            )
        for machine in made:
            _set_up(machine, made)
        yield made
    finally:
        for machine in made:
            _end_all(machine.namespace)
            shutil.rmtree(_NETNS_FILES / machine.namespace, ignore_errors=True)
        for namespace in (*(machine.namespace for machine in made), switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            _NETNS_FILES.rmdir()


def _set_up(machine: Machine, everybody: list[Machine]) -> None:
    files = _NETNS_FILES / machine.namespace
    files.mkdir(parents=True)
    names = "".join(f"{other.address} {other.name}\n" for other in everybody)
    (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    _ip("netns", "add", machine.namespace)
    _ip(
        "-n",
        machine.switch,
        "link",
        "add",
        "name",
        machine.port,
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        machine.namespace,
    )
    machine.plug_in()
    _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", "eth0")
    for interface in ("lo", "eth0"):
        _ip("-n", machine.namespace, "link", "set", interface, "up")


def _end_all(namespace: str) -> None:
    """Kill every process of a namespace."""
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    for pid in listed.stdout.split():
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
