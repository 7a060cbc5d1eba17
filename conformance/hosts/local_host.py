"""TODO: conformance/hosts/local_host.py."""

import contextlib
import json
import os
import select
import shutil
import socket
from pathlib import Path
from typing import Any

from conformance.hosts.operations import OPERATIONS, keep_bytecode, warm_up
from conformance.hosts.supervisor import Controller, ControllerGone, adopt_orphans, kill_children, require_one_thread


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
