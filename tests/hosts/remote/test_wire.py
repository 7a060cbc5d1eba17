"""Messages and files between controller and host: they arrive, and invalid ones are refused."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.hosts.remote.wire import LINE_LIMIT, RECORDS, ConnectionLost, Stream
from conformance.records.files import EVENTS, STATE

Pair = tuple[Stream, Stream]


@pytest.fixture
def pair() -> Iterator[Pair]:
    streams = [Stream(end) for end in socket.socketpair()]
    yield streams[0], streams[1]
    for stream in streams:
        stream.close()


def test_messages_and_files_arrive_as_they_were_sent(pair: Pair, tmp_path: Path) -> None:
    here, there = pair
    for folder in ("from/0", "from/1", "to/0", "to/1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "from" / "0" / EVENTS).write_bytes(b"{}\n" * 1000)
    (tmp_path / "from" / "1" / EVENTS).write_bytes(b"")
    files = [(rank, tmp_path / "from" / str(rank) / name) for rank in (0, 1) for name in RECORDS]
    here.send({"outcome": 1}, files)
    here.send({"next": 2})
    message = there.receive(5.0)
    there.receive_files(message, tmp_path / "to", (0, 1), RECORDS)
    assert (tmp_path / "to" / "0" / EVENTS).read_bytes() == b"{}\n" * 1000
    assert (tmp_path / "to" / "1" / EVENTS).read_bytes() == b""
    assert there.receive(5.0) == {"next": 2}


@pytest.mark.parametrize(
    "file",
    [
        {"rank": 0, "name": "../../evil", "size": 1},
        {"rank": 0, "name": STATE, "size": 1},
        {"rank": "../0", "name": EVENTS, "size": 1},
        {"rank": 7, "name": EVENTS, "size": 1},
        {"rank": 0, "name": EVENTS, "size": -1},
        {"rank": 0, "name": EVENTS, "size": 1 << 40},
        {"rank": [], "name": EVENTS, "size": 1},
        "events",
    ],
)
def test_a_file_that_was_not_requested_is_refused(pair: Pair, tmp_path: Path, file: object) -> None:
    (tmp_path / "run" / "0").mkdir(parents=True)
    with pytest.raises(ConnectionLost, match="not requested"):
        pair[0].receive_files({"files": [file]}, tmp_path / "run", (0,), RECORDS)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_invalid_message_is_refused() -> None:
    for sent in (b"not json\n", b"[1]\n", b"\xff\xfe\n", b"x" * (LINE_LIMIT + 1)):
        ours, theirs = socket.socketpair()
        stream = Stream(ours)
        theirs.setblocking(False)
        left = sent
        with theirs, pytest.raises(ConnectionLost, match="invalid message"):  # noqa: PT012
            while True:
                if left:
                    left = left[theirs.send(left) :]
                stream.read()
                stream.next_message()
        stream.close()


def test_an_ended_peer_and_a_silent_peer_are_distinguished(pair: Pair) -> None:
    with pytest.raises(ConnectionLost, match="did not answer"):
        pair[0].receive(0.0)
    pair[1].hang_up()
    with pytest.raises(ConnectionLost, match="its process ended"):
        pair[0].receive(5.0)
