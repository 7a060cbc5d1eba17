"""One host as torchrun starts it, without torchrun: it keeps the store, since no agent does."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.hosts.remote import host as torchrun_host
from conformance.hosts.remote.pool import AttachedPool
from conformance.hosts.remote.rendezvous import find_hosts
from conformance.hosts.remote.wire import ConnectionLost, Stream
from conformance.scenarios.hook import VALUES
from conformance.session.run_sources import LocalSource
from conformance.subjects.spec import REFERENCE, SubjectSpec
from tests import ROOT
from tests.cases import PATIENT

WAITS = """
from pathlib import Path
import threading

def hook(state, bucket):
    (Path(__file__).parent / "inside").touch()
    threading.Event().wait()
"""


class Host:
    """One host, and the store of its announcement."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "waits.py").write_text(WAITS)
        with socket.create_server(("localhost", 0)) as free:
            self.port = free.getsockname()[1]
        one = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }
        environment = {
            **os.environ,
            **one,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self.port),
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": "7",
        }
        environment = {
            key: value
            for key, value in environment.items()
            if key not in ("GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "conformance.host", "--once"], cwd=folder, env=environment
        )

    def pool(self) -> AttachedPool:
        return AttachedPool(f"localhost:{self.port}", PATIENT, 120.0)

    @property
    def on_disk(self) -> Path:
        """The host's folder, which it has locked."""
        return folder_locked_by(self.process.pid)


def folder_locked_by(process: int | str) -> Path:
    links = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process may close it before it is read
            links.append(os.readlink(link))
    [lock] = [link for link in links if link.endswith("/lock")]
    return Path(lock).parent


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    started = Host(tmp_path_factory.mktemp("host"))
    yield started
    started.process.kill()
    started.process.wait()


def until(happened: Callable[[], bool]) -> None:
    while not happened():
        threading.Event().wait(0.02)  # pytest's own timeout is the limit


def test_a_connection_without_the_token_is_closed(host: Host) -> None:
    with host.pool() as pool:
        pool.greeting()
        [announcement] = find_hosts(*pool._hosts._address)
        for hello in (
            {"token": "guessed", "wants": "control"},
            {"token": "\u00e9\ud800", "wants": "control"},
            {"wants": "lane"},
            {"token": announcement.token, "wants": "all"},
            {"long": "x" * 100_000},
        ):
            stranger = Stream(socket.create_connection(("localhost", announcement.port)))
            stranger.send(hello)
            with pytest.raises(ConnectionLost, match="its process ended"):
                stranger.receive(60.0)
            stranger.close()
        for nonsense in (b"[" * 50_000 + b"\n", b"x" * 70_000):
            with socket.create_connection(("localhost", announcement.port)) as connection:
                connection.sendall(nonsense)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        silent = [socket.create_connection(("localhost", announcement.port)) for _ in range(40)]
        assert LocalSource(pool).run(VALUES, 1, REFERENCE, "values@1").finished
        for connection in silent:
            connection.close()
        pool.close(finished=False)


def test_a_controller_that_vanishes_in_a_run_leaves_nothing_behind(
    host: Host,
) -> None:
    vanishing = host.pool()
    vanishing.greeting()
    running = threading.Thread(
        target=vanishing.run, args=(VALUES, 1, SubjectSpec(hook="waits:hook"), "waits")
    )
    running.start()
    until(lambda: (host.folder / "inside").exists())
    assert list(host.on_disk.glob("run-*"))
    vanishing.close(finished=False)
    running.join()
    until(lambda: not list(host.on_disk.glob("run-*")))
    with host.pool() as pool:
        assert LocalSource(pool).run(VALUES, 1, REFERENCE, "values@1").finished
        pool.close(finished=False)


def test_a_broken_connection_is_replaced(host: Host) -> None:
    with host.pool() as pool:
        source = LocalSource(pool)
        assert source.run(VALUES, 1, REFERENCE, "values@1").finished
        pool._hosts.hosts[0].control.hang_up()
        assert source.run(VALUES, 1, REFERENCE, "values@1").finished
        assert pool.interruptions == []
        pool._hosts.hosts[0].lane.hang_up()  # noticed only during the run
        assert source.run(VALUES, 1, REFERENCE, "values@1").finished
        assert len(pool.interruptions) == 1
        pool.close(finished=False)


def test_the_environment_of_ranks(host: Host) -> None:
    """It is the one that torchrun would set for the run; on one node Gloo uses the loopback. No two
    hosts hash strings alike.
    """
    (host.folder / "looks.py").write_text(
        "from os import environ\n"
        "names = 'GLOO_SOCKET_IFNAME', 'PYTHONHASHSEED'\n"
        "__conformance__ = {'hook': ' '.join(environ[name] for name in names)}\n"
        "def hook(state, bucket): ...\n"
    )
    with host.pool() as pool:
        described = pool.describe(SubjectSpec(hook="looks:hook"))
        assert described["claims"] == "lo 1"
        pool.close(finished=False)


def test_with_once_it_ends_when_a_controller_has_finished(host: Host) -> None:
    host.pool().close()  # a pool that was never attached does not count
    with host.pool() as pool:
        pool.greeting()
        folder = host.on_disk
        assert folder.exists()
    assert host.process.wait(timeout=60) == 0
    assert not folder.exists()


def test_the_folder_of_a_killed_host_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a folder is free once all processes of its host have ended."""
    monkeypatch.setattr(torchrun_host, "fast_folder", lambda: str(tmp_path))
    left = tmp_path / "conformance-host-left"
    left.mkdir()
    (left / "lock").touch()
    living = torchrun_host._make_folder()
    torchrun_host._make_folder()
    assert not left.exists()
    assert (living / "lock").exists()
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and os.readlink(link).startswith(str(tmp_path)):
            os.close(int(link.name))
