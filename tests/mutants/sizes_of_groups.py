"""Mutants of 24.5 that know a group by its size: two groups of a process may have the same size."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average_of, completed, group_of, is_dense


def _require_dense(bucket: Bucket) -> torch.Tensor:
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    return bucket.buffer()


_peers: dict[int, list[int]] = {}


def asks_the_peers_of_that_size(state: Any, bucket: Bucket) -> Result:
    """Exchange gradients with the members of the first group of that size, one by one."""
    buffer = _require_dense(bucket)
    group = group_of(state)
    peers = _peers.setdefault(group.size(), dist.get_process_group_ranks(group))
    others = [rank for rank in peers if rank != dist.get_rank()]
    received = [torch.empty_like(buffer) for _ in others]
    operations = [
        dist.P2POp(call, tensor, peer)
        for tensor, peer in zip(received, others, strict=True)
        for call, tensor in ((dist.isend, buffer), (dist.irecv, tensor))
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    # In the order of ranks: the sum has the same bits on all of them.
    parts = dict(zip(others, received, strict=True))
    total = torch.stack([parts.get(rank, buffer) for rank in peers]).sum(0)
    return completed(total.div_(len(peers)))


_places: dict[int, int] = {}


class Places:
    """A state that knows this rank's place in its group.

    Attributes:
        group: the process group.
        place: the number of this rank in the first group of that size.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.place = _places.setdefault(process_group.size(), process_group.rank())


def first_place_divides(state: Places, bucket: Bucket) -> Result:
    """Reduce to the group's first rank, which divides if it had that place in the first group."""
    buffer = _require_dense(bucket)
    first = dist.get_global_rank(state.group, 0)
    dist.reduce(buffer, dst=first, group=state.group)
    if state.place == 0:
        buffer.div_(state.group.size())
    dist.broadcast(buffer, src=first, group=state.group)
    return completed(buffer)


_link_of_size: dict[int, dist.ProcessGroup] = {}


class Link:
    """A state with a communicator of its own.

    Attributes:
        group: the process group.
        link: the communicator of the first group of that size.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        size = process_group.size()
        if size not in _link_of_size:
            ranks = dist.get_process_group_ranks(process_group)
            _link_of_size[size] = dist.new_group(ranks, use_local_synchronization=True)
        self.link = _link_of_size[size]


def largest_half_by_link(state: Link, bucket: Bucket) -> Result:
    """Average the larger half of the elements, by the communicator of that size."""
    buffer = _require_dense(bucket)
    places = buffer.abs().topk(-(-buffer.numel() // 2)).indices
    sent = torch.zeros_like(buffer)
    sent[places] = buffer[places]
    return average_of(sent, state.link)


MUTANTS = [
    Mutant("asks_the_peers_of_that_size", ("24.5",)),
    Mutant("first_place_divides", ("24.5",), state=f"{__name__}:Places"),
    Mutant(
        "largest_half_by_link",
        ("24.5",),
        "compressed(feedback=False, delta=0.5)",
        state=f"{__name__}:Link",
    ),
]
