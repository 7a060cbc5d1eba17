"""A connection between a controller and a host on another machine: lines of JSON, and files after them. Imports no torch.

Nothing is unpickled, lines and files are bounded, and files go by names of a fixed list: whoever receives one decides where it is
written. A peer whose machine is gone or cut off says nothing any more, so the kernel asks after it: within ``SILENCE`` seconds
either an answer comes or the connection fails.
"""

import contextlib
import errno
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.records.files import EVENTS, MODEL, STATE, TENSORS

RECORDS, SAVED = (EVENTS, TENSORS), (STATE, MODEL)  # what a rank writes for rules, and for a process that goes on from there
SILENCE = 12  # seconds until a peer that does not answer is given up
ASLEEP = 60.0  # seconds for a peer that does answer, but takes nothing
LINE_LIMIT = 8 << 20  # bytes
FILE_LIMIT = 1 << 30  # bytes
ENDED, SILENT = "its process ended", "it did not answer"  # how a peer may be lost whose machine is there
_PIECE = 1 << 20


class ConnectionLost(Exception):
    """The other end is gone; ``str(error)`` says how that showed."""


class Stream:
    """One end of a connection.

    Args:
        connection: a connected TCP socket; it is closed with the stream.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer = connection, bytearray()
        connection.settimeout(ASLEEP)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            _ask_after_the_peer(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def addresses(self) -> tuple[str, str]:
        """This end's address, and the peer's."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def send(self, message: dict[str, Any], files: Sequence[tuple[int, Path]] = ()) -> None:
        """Send a message, and files with the rank that each belongs to; one that is not there is left out.

        Raises:
            ConnectionLost: the peer is gone.
        """
        there = [(rank, path, path.stat().st_size) for rank, path in files if path.is_file()]
        listed = {"files": [{"rank": rank, "name": path.name, "size": size} for rank, path, size in there]} if there else {}
        try:
            self._socket.sendall(json.dumps({**message, **listed}).encode() + b"\n")
            for _, path, size in there:
                self._send_file(path, size)
        except OSError as error:
            raise ConnectionLost(_in_words(error)) from error

    def receive(self, seconds: float | None) -> dict[str, Any]:
        """Return the next message.

        Args:
            seconds: for how long to wait; None means for as long as the peer is there.

        Raises:
            ConnectionLost: the peer is gone, sent what is no message, or nothing in time.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while (message := self.pop()) is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self], [], [], left)[0]:
                raise ConnectionLost(SILENT)
            self.fill()
        return message

    def fill(self) -> None:
        """Take in what has come. Raises: ConnectionLost."""
        try:
            piece = self._socket.recv(_PIECE)
        except OSError as error:
            raise ConnectionLost(_in_words(error)) from error
        if not piece:
            raise ConnectionLost(ENDED)
        self._buffer += piece

    def pop(self) -> dict[str, Any] | None:
        """Return a message that has come whole, if there is one. Raises: ConnectionLost, where it is none."""
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            if len(line) > LINE_LIMIT:
                raise ConnectionLost("it sent what is no message")
            return None
        self._buffer = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConnectionLost("it sent what is no message") from error
        if not isinstance(message, dict):
            raise ConnectionLost("it sent what is no message")
        return message

    @property
    def held(self) -> int:
        """How many bytes have come that nobody has taken."""
        return len(self._buffer)

    @property
    def pending(self) -> bool:
        """Whether a message has come already."""
        return b"\n" in self._buffer

    def receive_files(self, message: dict[str, Any], folder: Path, ranks: Sequence[int], names: Sequence[str]) -> None:
        """Write the files that come after a message as ``folder/RANK/NAME``.

        Args:
            message: it names them.
            folder: where they go; it has a folder for each of ``ranks``.
            ranks: whose files these may be.
            names: what they may be called.

        Raises:
            ConnectionLost: the peer is gone, or sends what is none of these.
            OSError: a file cannot be written.
        """
        for file in message.get("files", ()):
            rank, name, size = (file.get(key) for key in ("rank", "name", "size")) if isinstance(file, dict) else (None, None, None)
            if rank not in ranks or name not in names or not isinstance(size, int) or not 0 <= size <= FILE_LIMIT:
                raise ConnectionLost("it sent a file that was not asked for")
            self._receive_file(folder / str(ranks[ranks.index(rank)]) / str(name), size)

    def hang_up(self) -> None:
        """End the connection, also for another thread that waits for it, and for another process that has this end too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of this end."""
        self._socket.close()

    def _send_file(self, path: Path, size: int) -> None:
        with open(path, "rb") as file:
            sent = 0
            while sent < size:
                piece = file.read(min(_PIECE, size - sent)) or b"\0" * min(_PIECE, size - sent)  # it has become shorter
                self._socket.sendall(piece)
                sent += len(piece)

    def _receive_file(self, path: Path, size: int) -> None:
        with open(path, "wb") as file:
            while size:
                if not self._buffer:
                    self.fill()
                piece = self._buffer[:size]
                file.write(piece)
                size -= len(piece)
                del self._buffer[: len(piece)]


def who_am_i() -> str:
    """Return what a person needs to find this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _ask_after_the_peer(connection: socket.socket) -> None:
    """Have the kernel notice a peer that no longer answers, whether or not anything is under way to it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, SILENCE // 4),
        (socket.TCP_KEEPINTVL, SILENCE // 4),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, SILENCE * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _in_words(error: OSError) -> str:
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"it took nothing for {ASLEEP:.0f} seconds"
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return ENDED
    return f"no answer from its machine ({error.strerror})"
