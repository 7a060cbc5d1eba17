"""A connection between a controller and a host on another machine: lines of JSON, and files.

Nothing is unpickled. Lines and files have a limit of size, and a file has one of a fixed list of
names: the receiver alone decides where it is written. A peer whose machine is down or cut off sends
nothing any more, so the kernel probes the connection: within ``SILENCE`` seconds either the peer
answers or the connection fails. This module imports no torch.
"""

import contextlib
import errno
import json
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.records.files import COVERAGE, EVENTS, MODEL, STATE, TENSORS

RECORDS = (EVENTS, TENSORS, COVERAGE)  # files that a rank writes for rules
SAVED = (STATE, MODEL)  # files that a rank writes for a process that resumes from them
SILENCE = 12  # seconds until a peer that does not answer is given up
STALLED = 60.0  # seconds for a peer that answers the kernel, but reads nothing
LINE_LIMIT = 8 << 20  # bytes
FILE_LIMIT = 1 << 30  # bytes
# How a peer was lost if its machine is still there.
ENDED = "its process ended"
SILENT = "it did not answer"
_CHUNK = 1 << 20
_INVALID_MESSAGE = "it sent an invalid message"


class ConnectionLost(Exception):
    """The other end is gone; ``str(error)`` is how that showed."""


class Stream:
    """One end of a connection.

    Args:
        connection: a connected TCP socket; it is closed with the stream.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        connection.settimeout(STALLED)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            _probe_peer(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer_address(self) -> str:
        """The address of the other end."""
        return str(self._socket.getpeername()[0])

    def send(self, message: dict[str, Any], files: Sequence[tuple[int, Path]] = ()) -> None:
        """Send a message, and files after it, each with its rank; missing files are left out.

        Raises:
            ConnectionLost: the peer is gone.
        """
        existing = [(rank, path, path.stat().st_size) for rank, path in files if path.is_file()]
        if existing:
            listed = [
                {"rank": rank, "name": path.name, "size": size} for rank, path, size in existing
            ]
            message = {**message, "files": listed}
        with _as_connection_lost():
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            for _, path, size in existing:
                self._send_file(path, size)

    def receive(self, seconds: float | None) -> dict[str, Any]:
        """Return the next message.

        Args:
            seconds: how long to wait; None waits as long as the peer is there.

        Raises:
            ConnectionLost: the peer is gone, sent an invalid message, or sent nothing in time.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while (message := self.next_message()) is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self], [], [], left)[0]:
                raise ConnectionLost(SILENT)
            self.read()
        return message

    def read(self) -> None:
        """Read the bytes that have arrived into the buffer. Raises: ConnectionLost."""
        with _as_connection_lost():
            chunk = self._socket.recv(_CHUNK)
        if not chunk:
            raise ConnectionLost(ENDED)
        self._buffer += chunk

    def next_message(self) -> dict[str, Any] | None:
        """Return the next message of the buffer; None if no message is complete yet.

        Raises:
            ConnectionLost: the peer sent an invalid message.
        """
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            if len(line) > LINE_LIMIT:
                raise ConnectionLost(_INVALID_MESSAGE)
            return None
        self._buffer = rest
        try:
            message = json.loads(line)
        # Deeply nested JSON exceeds the recursion limit.
        except (ValueError, RecursionError) as error:
            raise ConnectionLost(_INVALID_MESSAGE) from error
        if not isinstance(message, dict):
            raise ConnectionLost(_INVALID_MESSAGE)
        return message

    @property
    def buffered(self) -> int:
        """The number of bytes in the buffer."""
        return len(self._buffer)

    @property
    def has_message(self) -> bool:
        """Whether a message is complete in the buffer."""
        return b"\n" in self._buffer

    def receive_files(
        self, message: dict[str, Any], folder: Path, ranks: Sequence[int], names: Sequence[str]
    ) -> None:
        """Write the files that follow a message as ``folder/RANK/NAME``.

        Args:
            message: lists the files.
            folder: has a folder for each of ``ranks``.
            ranks: the ranks whose files are accepted.
            names: the names that are accepted.

        Raises:
            ConnectionLost: the peer is gone, or sends a file that is not accepted.
            OSError: a file cannot be written.
        """
        for file in message.get("files", ()):
            entry = file if isinstance(file, dict) else {}
            rank = entry.get("rank")
            name = entry.get("name")
            size = entry.get("size")
            expected = rank in ranks and name in names
            if not expected or not isinstance(size, int) or not 0 <= size <= FILE_LIMIT:
                raise ConnectionLost("it sent a file that was not requested")
            # The path is built from values of this end: True, for example, equals rank 1.
            own_rank = ranks[ranks.index(rank)]
            self._receive_file(folder / str(own_rank) / str(name), size)

    def hang_up(self) -> None:
        """End the connection for everybody.

        Another thread that waits for it wakes up, and another process that holds this end too can
        no longer use it.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end in this process."""
        self._socket.close()

    def _send_file(self, path: Path, size: int) -> None:
        with open(path, "rb") as file:
            sent = 0
            while sent < size:
                wanted = min(_CHUNK, size - sent)
                # The peer expects the announced size, even if the file has become shorter.
                chunk = file.read(wanted) or b"\0" * wanted
                self._socket.sendall(chunk)
                sent += len(chunk)

    def _receive_file(self, path: Path, size: int) -> None:
        with open(path, "wb") as file:
            while size:
                if not self._buffer:
                    self.read()
                chunk = self._buffer[:size]
                file.write(chunk)
                size -= len(chunk)
                del self._buffer[: len(chunk)]


def describe_process() -> str:
    """Return a text by which a person can find this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _probe_peer(connection: socket.socket) -> None:
    """Make the kernel notice a peer that no longer answers, whether or not data is on its way."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        # Keepalive probes notice a silent peer of an idle connection.
        (socket.TCP_KEEPIDLE, SILENCE // 4),
        (socket.TCP_KEEPINTVL, SILENCE // 4),
        (socket.TCP_KEEPCNT, 3),
        # This limit applies while data is on its way.
        (socket.TCP_USER_TIMEOUT, SILENCE * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


@contextlib.contextmanager
def _as_connection_lost() -> Iterator[None]:
    """Turn an error of the socket into ConnectionLost."""
    try:
        yield
    except OSError as error:
        raise ConnectionLost(_describe(error)) from error


def _describe(error: OSError) -> str:
    # The timeout of the Python socket has no errno; one of the kernel's has.
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"it took nothing for {STALLED:.0f} seconds"
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return ENDED
    return f"no answer from its machine ({error.strerror})"
