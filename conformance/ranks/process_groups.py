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


def make_groups(scenario: Scenario, rank: int, world: int, folder: Path, timeout: float, device: torch.device) -> tuple[Any, Any]:
    """Make the default group, and those of the scenario; return the kit's own store and the group that this rank trains in.

    Args:
        folder: the run's folder, where the store is, or what says where it is.
        timeout: of the groups, in seconds, unless the scenario has one of its own.
        device: of this rank.
    """
    store, signals = _meet(folder, world)
    if device.type != "cpu":  # devices take their time to start, which is to count for no group's timeout
        torch.zeros(1, device=device)
        everybody(signals, "device", rank, world, timeout)
    limit = datetime.timedelta(seconds=scenario.fault.group_timeout or timeout)
    if scenario.fault.group_timeout:  # a group that the subject makes without a timeout has this one
        dist.distributed_c10d.default_pg_timeout = limit
    dist.init_process_group(scenario.profile.backend, store=store, rank=rank, world_size=world, timeout=limit)
    groups = [dist.new_group(list(ranks)) for ranks in scenario.groups]
    group = groups[scenario.groups.index(scenario.group_of(rank, world))] if groups else dist.group.WORLD
    if scenario.profile.ordered:
        _connect(group, device)
    return signals, group


def _meet(folder: Path, world: int) -> tuple[dist.Store, Any]:
    """Return the store for the groups, and the kit's own; on several machines both are in the store of torchrun's rendezvous."""
    try:
        meeting = json.loads((folder / MEETING).read_text())
    except FileNotFoundError:
        store = dist.FileStore(str(folder / "store"), world)
        return store, dist.PrefixStore("conformance", store)

    def connect(prefix: str) -> dist.Store:
        return dist.PrefixStore(f"{meeting['run']}/{prefix}", dist.TCPStore(meeting["host"], meeting["port"], is_master=False))

    return connect("groups"), Signals(lambda: connect("conformance"))


class Signals:
    """A store in which threads do not wait for each other: a client of a TCPStore does one thing at a time, and waiting is one.

    Args:
        connect: makes a client.
    """

    def __init__(self, connect: Callable[[], dist.Store]) -> None:
        self._connect, self._own = connect, threading.local()

    def set(self, key: str, value: str) -> None:
        self._client().set(key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._client().check(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        self._client().wait(keys, timeout)

    def _client(self) -> dist.Store:
        if not hasattr(self._own, "client"):
            self._own.client = self._connect()
        return self._own.client


def _connect(group: Any, device: torch.device) -> None:
    """Have ranks connect now: such a backend does so in the first collective, in which a rank waits for its peers on the host."""
    for each in dict.fromkeys((dist.group.WORLD, group)):
        dist.all_reduce(torch.zeros(1, device=device), group=each)


_ended: list[Any] = []


def end_groups() -> None:
    """Destroy all groups, the subject's own too; the objects stay until the process ends.

    The last to hold one may be a callback of it, which its own thread has yet to put away. That thread would wait for itself to end,
    and abort the process (torch 2.13, Gloo: ``std::system_error``, Resource deadlock avoided), whatever the subject does.
    """
    _ended.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def everybody(signals: dist.Store, name: str, rank: int, world: int, timeout: float) -> None:
    """A barrier through the store, which no collective of the subject can be mistaken for."""
    signals.set(f"{name}/{rank}", "1")
    signals.wait([f"{name}/{other}" for other in range(world)], datetime.timedelta(seconds=timeout))
