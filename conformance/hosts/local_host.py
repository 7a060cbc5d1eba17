"""The host of a pool: forks lanes for the controller on this machine, and reports their ends."""

import contextlib
import json
import os
import select
import shutil
import socket
from pathlib import Path
from typing import Any

from conformance.hosts.operations import OPERATIONS, keep_code, warm_up
from conformance.hosts.supervisor import (
    Controller,
    ControllerGone,
    adopt_orphans,
    kill_children,
    require_one_thread,
)


def serve_host(control: socket.socket, base: Path) -> None:
    """Import the modules of ranks, and fork lanes until the controller hangs up.

    Args:
        control: the socket on which the controller's packets arrive.
        base: the folder of the runs; it is removed at the end.
    """
    adopt_orphans()
    host = _LocalHost(control)
    with contextlib.suppress(ConnectionError):
        _send(control, {"greeting": warm_up()})
        keep_code(base)
        while True:
            host.serve_events()
    # The lanes saw the controller hang up as well, and end by themselves.
    for _, pid in host.lanes.values():
        os.waitpid(pid, 0)
    kill_children()
    shutil.rmtree(base, ignore_errors=True)


class _LocalHost:
    """The lanes of a host.

    Attributes:
        lanes: the number and the pid of each lane, by its pidfd.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self.lanes: dict[int, tuple[int, int]] = {}

    def serve_events(self) -> None:
        """Wait for packets and for ends of lanes, and handle them.

        Raises:
            ConnectionError: the controller hung up.
        """
        poller = select.poll()
        for fd in (self._control.fileno(), *self.lanes):
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll():
            if fd == self._control.fileno():
                self._receive_packet()
            else:
                self._report_end(fd)

    def _receive_packet(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
        if not packet:
            raise ConnectionError
        request = json.loads(packet)
        if "ping" in request:
            _send(self._control, {"pong": request["ping"]})
            return
        number = request["lane"]
        pid = _fork_lane(fds[0], self._control, list(self.lanes))
        self.lanes[os.pidfd_open(pid)] = (number, pid)
        os.close(fds[0])
        _send(self._control, {"lane": number, "pid": pid})

    def _report_end(self, pidfd: int) -> None:
        number, pid = self.lanes.pop(pidfd)
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        # The lane's subject may have left processes behind, which are children of the host now.
        kill_children(spare={pid for _, pid in self.lanes.values()})
        _send(self._control, {"lane": number, "ended": status})


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


def _fork_lane(connection: int, control: socket.socket, pidfds: list[int]) -> int:
    """Fork a lane that serves a connection, and return its pid."""
    require_one_thread()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        # A process group of its own: a subject that kills the lane's group does not kill the host.
        os.setpgid(0, 0)
        control.close()
        for fd in pidfds:
            os.close(fd)
        adopt_orphans()
        _serve_lane(socket.socket(fileno=connection))
        status = 0
    finally:
        os._exit(status)


def _serve_lane(connection: socket.socket) -> None:
    """Carry out commands until the controller hangs up."""
    stream = connection.makefile("rw", encoding="utf-8", newline="\n")
    with contextlib.suppress(ControllerGone, ConnectionError):
        for line in stream:
            command = json.loads(line)
            controller = Controller(connection.fileno())
            try:
                answer = OPERATIONS[command["op"]](command, controller)
            except OSError as error:
                reason = error.strerror or error
                answer = {"kit_error": f"{reason}: {error.filename or command['folder']}"}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
