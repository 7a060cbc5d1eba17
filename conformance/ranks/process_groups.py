"""The process groups of a scenario, as a rank makes them. Runs in ranks only."""

import datetime
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.records.files import MEETING
from conformance.scenarios.model import Scenario
from conformance.torch_versions.private import known_groups


def make_groups(
    scenario: Scenario, rank: int, world: int, folder: Path, timeout: float, device: torch.device
) -> tuple[Any, Any, Any, dist.Store]:
    """Make the default group and the scenario's groups.

    Args:
        folder: the run's folder, with the store or the address of one.
        timeout: of the groups, in seconds, unless the scenario has a timeout of its own.
        device: of this rank.

    Returns:
        The kit's own store, the group that this rank trains in, the group of its twin, and the
        store of all groups.
    """
    store, signals = _meet(folder, world)
    if device.type != "cpu":
        # A device takes its time to start, which must not count for any group's timeout.
        torch.zeros(1, device=device)
        everybody(signals, "device", rank, world, timeout)
    limit = datetime.timedelta(seconds=scenario.fault.group_timeout or timeout)
    if scenario.fault.group_timeout:
        # Groups that the subject makes without a timeout get this one.
        dist.distributed_c10d.default_pg_timeout = limit
    dist.init_process_group(
        scenario.profile.backend, store=store, rank=rank, world_size=world, timeout=limit
    )
    group = _own_group(scenario.groups, rank) or dist.group.WORLD
    twin_group = _own_group(scenario.twin_groups, rank) or group
    if scenario.profile.ordered:
        for each in dict.fromkeys((dist.group.WORLD, group, twin_group)):
            # Such a backend connects in the first collective, on the host.
            dist.all_reduce(torch.zeros(1, device=device), group=each)
    return signals, group, twin_group, store


def _own_group(groups: tuple[tuple[int, ...], ...], rank: int) -> Any:
    """Make disjoint groups, and return the group of a rank; None if it is in none of them."""
    made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    return next((group for ranks, group in made if rank in ranks), None)


def _meet(folder: Path, world: int) -> tuple[dist.Store, Any]:
    """Return the store for the groups, and the kit's own store.

    On several machines both lie in the store of torchrun's rendezvous.
    """
    try:
        meeting = json.loads((folder / MEETING).read_text())
    except FileNotFoundError:
        # Two files: the keys of the groups are counted (``instruments/kept.py``).
        signals = dist.FileStore(str(folder / "signals"), world)
        return dist.FileStore(str(folder / "store"), world), signals

    def connect(prefix: str) -> dist.Store:
        client = dist.TCPStore(meeting["host"], meeting["port"], is_master=False)
        return dist.PrefixStore(f"{meeting['run']}/{prefix}", client)

    return connect("groups"), Signals(lambda: connect("conformance"))


class Signals:
    """A store in which the waits of one thread do not delay another thread.

    A client of a TCPStore serves one request at a time, and a wait is one. So each thread has a
    client of its own.

    Args:
        connect: makes a client.
    """

    def __init__(self, connect: Callable[[], dist.Store]) -> None:
        self._connect = connect
        self._own = threading.local()

    def set(self, key: str, value: str) -> None:
        self._client().set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._client().get(key)
        return value

    def check(self, keys: list[str]) -> bool:
        return bool(self._client().check(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        self._client().wait(keys, timeout)

    def _client(self) -> dist.Store:
        if not hasattr(self._own, "client"):
            self._own.client = self._connect()
        return self._own.client


_ended: list[Any] = []


def end_groups() -> None:
    """Destroy all groups, the subject's included; the objects stay until the process ends.

    The last reference to a group may be held by a callback that the group's own thread has yet to
    put away. That thread would wait for itself to end, and abort the process (torch 2.13, Gloo:
    ``std::system_error``, Resource deadlock avoided), whatever the subject does.
    """
    _ended.extend(known_groups().pg_map)
    dist.destroy_process_group()


def everybody(signals: dist.Store, name: str, rank: int, world: int, timeout: float) -> None:
    """Wait for all ranks through the store; no collective of the subject can interfere."""
    signals.set(f"{name}/{rank}", "1")
    peers = [f"{name}/{other}" for other in range(world)]
    signals.wait(peers, datetime.timedelta(seconds=timeout))
