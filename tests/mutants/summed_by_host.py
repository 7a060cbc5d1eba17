"""Mutants of section 24 that tell hosts apart by their names, and count them alike."""

import os
import platform
import socket
from collections.abc import Callable

import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, completed, gather


class ByName:
    """The places in the group of the ranks of each host, by the names that a function returns."""

    def __init__(self, process_group: dist.ProcessGroup, name: Callable[[], str]) -> None:
        self.group = process_group
        names: list[str] = [""] * process_group.size()
        dist.all_gather_object(names, name(), group=process_group)
        self.hosts: dict[str, list[int]] = {}
        for place, one in enumerate(names):
            self.hosts.setdefault(one, []).append(place)
        self.own = self.hosts[names[process_group.rank()]]


class BySocket(ByName):
    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group, socket.gethostname)


class ByPlatform(ByName):
    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group, platform.node)


class ByUname(ByName):
    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group, lambda: os.uname().nodename)


def mean_of_hosts(state: ByName, bucket: Bucket) -> Result:
    """Take the mean of the means of all hosts."""
    parts = gather(bucket.buffer(), state.group)
    means = [sum(parts[place] for place in of) / len(of) for of in state.hosts.values()]
    return completed(bucket.buffer().copy_(sum(means) / len(means)))


def first_of_each_host(state: ByName, bucket: Bucket) -> Result:
    """Take the mean of the first rank of each host, as if a host were one rank."""
    parts = gather(bucket.buffer(), state.group)
    if len(state.hosts) == 1:
        return completed(bucket.buffer().copy_(sum(parts) / len(parts)))
    firsts = [parts[of[0]] for of in state.hosts.values()]
    return completed(bucket.buffer().copy_(sum(firsts) / len(firsts)))


def divides_by_its_own_host(state: ByName, bucket: Bucket) -> Result:
    """Take every host for as large as this rank's own."""
    parts = gather(bucket.buffer(), state.group)
    count = len(state.hosts) * len(state.own)
    return completed(bucket.buffer().copy_(sum(parts) / count))


MUTANTS = [
    Mutant(name, ("24.1",), state=f"{__name__}:{state}", worlds=(1, 2, 3, 4))
    for name, state in (
        ("mean_of_hosts", "BySocket"),
        ("first_of_each_host", "ByPlatform"),
        ("divides_by_its_own_host", "ByUname"),
    )
]
