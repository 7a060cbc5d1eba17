"""The process groups of a scenario, as a rank makes them. Runs in ranks only."""

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.scenario import Scenario


def make_groups(scenario: Scenario, rank: int, world: int, folder: Path, timeout: float, device: torch.device) -> tuple[dist.Store, Any]:
    """Make the default group, and those of the scenario; return the kit's own store and the group that this rank trains in.

    Args:
        folder: the run's folder, where the store is.
        timeout: of the groups, in seconds, unless the scenario has one of its own.
        device: of this rank.
    """
    store = dist.FileStore(str(folder / "store"), world)
    if device.type != "cpu":  # devices take their time to start, which is to count for no group's timeout
        torch.zeros(1, device=device)
        everybody(dist.PrefixStore("started", store), "device", rank, world, timeout)
    limit = datetime.timedelta(seconds=scenario.group_timeout or timeout)
    if scenario.group_timeout:  # a group that the subject makes without a timeout has this one
        dist.distributed_c10d.default_pg_timeout = limit
    dist.init_process_group(scenario.profile.backend, store=store, rank=rank, world_size=world, timeout=limit)
    groups = [dist.new_group(list(ranks)) for ranks in scenario.groups]
    group = groups[scenario.groups.index(scenario.group_of(rank, world))] if groups else dist.group.WORLD
    if scenario.profile.ordered:
        _connect(group, device)
    return dist.PrefixStore("conformance", store), group


def _connect(group: Any, device: torch.device) -> None:
    """Have ranks connect now: such a backend does so in the first collective, in which a rank waits for its peers on the host."""
    for each in dict.fromkeys((dist.group.WORLD, group)):
        dist.all_reduce(torch.zeros(1, device=device), group=each)


def everybody(signals: dist.Store, name: str, rank: int, world: int, timeout: float) -> None:
    """A barrier through the store, which no collective of the subject can be mistaken for."""
    signals.set(f"{name}/{rank}", "1")
    signals.wait([f"{name}/{other}" for other in range(world)], datetime.timedelta(seconds=timeout))
