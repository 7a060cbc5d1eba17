"""Hooks for clusters: they read torchrun's variables, or pass gradients from rank to rank."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.right import Right
from tests.right._common import Bucket, Group, Result, completed, dense, gather


class Nodes:
    """The nodes of a group's ranks, found by ``GROUP_RANK``, with groups for both levels.

    Groups need the ranks of this group alone, so that the state can be made on any of them.

    Attributes:
        group: the whole group.
        node: the group of the ranks on this rank's node.
        leaders: the group of the first ranks of all nodes; None on the other ranks.
    """

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        ranks = dist.get_process_group_ranks(process_group)
        numbers = gather(torch.tensor([int(os.environ["GROUP_RANK"])]), process_group)
        nodes: dict[int, list[int]] = {}
        for rank, number in zip(ranks, numbers, strict=True):
            nodes.setdefault(int(number), []).append(rank)
        here = nodes[int(os.environ["GROUP_RANK"])]
        self.node = dist.new_group(here, use_local_synchronization=True)
        first = [node[0] for node in nodes.values()]
        is_leader = here[0] == dist.get_rank()
        # torch names such a group by its ranks and by the number of groups that a rank has made:
        # all ranks of a later group have to have made equally many.
        made = dist.new_group(
            first if is_leader else [dist.get_rank()], use_local_synchronization=True
        )
        self.leaders = made if is_leader else None


def hierarchical(state: Nodes, bucket: Bucket) -> Result:
    """Reduce within the node, sum among the first ranks of nodes, and broadcast within the node."""
    buffer = dense(bucket)
    dist.reduce(buffer, dst=dist.get_global_rank(state.node, 0), group=state.node)
    if state.leaders is not None:
        dist.all_reduce(buffer, group=state.leaders)
        buffer.div_(state.group.size())
    dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
    return completed(buffer)


def hierarchical_sum(state: Nodes, bucket: Bucket) -> Result:
    """Give the sum by the same two levels."""
    buffer = dense(bucket)
    dist.all_reduce(buffer, group=state.node)
    if state.leaders is not None:
        dist.all_reduce(buffer, group=state.leaders)
    dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
    return completed(buffer)


def half_between_nodes(state: Nodes, bucket: Bucket) -> Result:
    """Send float16 between nodes, and full precision within a node."""
    buffer = dense(bucket)
    dist.reduce(
        buffer.div_(state.group.size()), dst=dist.get_global_rank(state.node, 0), group=state.node
    )
    if state.leaders is not None:
        narrow = buffer.half()
        dist.all_reduce(narrow, group=state.leaders)
        buffer.copy_(narrow)
    dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
    return completed(buffer)


_PIECE = 1 << 15


def half_sums_in_pieces(state: Nodes, bucket: Bucket) -> Result:
    """Sum piece by piece, each in memory of its own; those of half precision are sums in float32
    within a node, and in their own dtype between nodes.
    """
    buffer = dense(bucket)
    under_way = []
    for piece in buffer.split(_PIECE):
        is_half = piece.dtype in (torch.float16, torch.bfloat16)
        wide = piece.float() if is_half else piece.clone()
        dist.all_reduce(wide, group=state.node)
        part = wide.to(piece.dtype)
        work = None
        if state.leaders is not None:
            work = dist.all_reduce(part, group=state.leaders, async_op=True)
        under_way.append((piece, part, work))
    for piece, part, work in under_way:
        if work is not None:
            work.wait()
        piece.copy_(part.div_(state.group.size()))
    dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
    return completed(buffer)


class Shards:
    """The ranks of WORLD by node and place on the node, by the variables alone.

    All ranks of WORLD make all groups, in one order, as ``new_group`` wants it.

    Attributes:
        node: the group of this node.
        across: the group of the ranks with this place on their nodes; None if nodes differ in
            size.
        size: the ranks of WORLD.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.size = world_size
        mine = torch.tensor([int(os.environ[name]) for name in ("GROUP_RANK", "LOCAL_RANK")])
        places = [tuple(place.tolist()) for place in gather(mine, dist.group.WORLD)]
        assert places[rank] == tuple(mine.tolist())
        numbers = sorted({node for node, _ in places})
        members = [[r for r in range(world_size) if places[r][0] == node] for node in numbers]
        groups = [dist.new_group(node) for node in members]
        self.node = groups[numbers.index(int(mine[0]))]
        self.across = None
        if len({len(node) for node in members}) == 1:
            columns = [dist.new_group(list(column)) for column in zip(*members, strict=True)]
            self.across = columns[int(os.environ["LOCAL_RANK"])]


def two_stages(state: Shards, bucket: Bucket) -> Result:
    """Reduce and scatter within the node, sum each shard across nodes, and gather it again.

    If nodes differ in size, average over WORLD at once.
    """
    buffer = dense(bucket)
    if state.across is None:
        dist.all_reduce(buffer)
        return completed(buffer.div_(state.size))
    local = state.node.size()
    padded = torch.nn.functional.pad(buffer, (0, -buffer.numel() % local))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=state.node)
    shard = received.view(local, -1).sum(0)
    dist.all_reduce(shard, group=state.across)
    shards = gather(shard.div_(state.size), state.node)
    return completed(torch.cat(shards)[: buffer.numel()])


def set_up_nodes(ddp: DistributedDataParallel) -> Any:
    """Return a hook whose groups belong to the ranks of each node, after a barrier of WORLD.

    The barrier and ``new_group`` need all ranks, which all call the set-up.
    """
    dist.barrier()
    group = ddp.process_group
    twins = [dist.new_group(ranks, use_local_synchronization=False) for ranks in _all_groups(group)]
    own = next(twin for twin in twins if twin is not dist.GroupMember.NON_GROUP_MEMBER)

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = dense(bucket).div_(own.size())
        work = dist.all_reduce(buffer, group=own, async_op=True)
        return work.get_future().then(lambda fut: fut.value()[0])

    return hook


def _all_groups(group: Group) -> list[list[int]]:
    """Return the ranks of the groups of all ranks, each once, in one order on all of them."""
    mine = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    mine[dist.get_process_group_ranks(group)] = 1
    rows = {tuple(row.tolist()) for row in gather(mine, dist.group.WORLD)}
    return [[rank for rank, member in enumerate(row) if member] for row in sorted(rows)]


def _exchange(tensor: torch.Tensor, to: int, come: int, group: Group) -> torch.Tensor:
    """Send a tensor to one rank of the group, and return that of another one."""
    theirs = torch.empty_like(tensor)
    send = dist.isend(tensor.clone(), dist.get_global_rank(group, to), group=group)
    dist.recv(theirs, dist.get_global_rank(group, come), group=group)
    send.wait()
    return theirs


def recursive_doubling(group: Group, bucket: Bucket) -> Result:
    """Fold the ranks beyond a power of two into the first ones, and double recursively."""
    buffer = dense(bucket).clone()
    size = group.size()
    rank = group.rank()
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    if rank >= power:
        dist.send(buffer, dst=dist.get_global_rank(group, rank - power), group=group)
        dist.recv(buffer, src=dist.get_global_rank(group, rank - power), group=group)
        return completed(buffer)
    if rank < extra:
        folded = torch.empty_like(buffer)
        dist.recv(folded, src=dist.get_global_rank(group, rank + power), group=group)
        buffer.add_(folded)
    mask = 1
    while mask < power:
        theirs = _exchange(buffer, rank ^ mask, rank ^ mask, group)
        # The lower rank's part comes first on both, so that both have the same bits.
        buffer = buffer + theirs if rank & mask == 0 else theirs + buffer
        mask <<= 1
    buffer.div_(size)
    if rank < extra:
        dist.send(buffer, dst=dist.get_global_rank(group, rank + power), group=group)
    return completed(buffer)


def ring(group: Group, bucket: Bucket) -> Result:
    """Reduce and gather shards around a ring; some shards of a small bucket are empty."""
    buffer = dense(bucket).div_(group.size())
    size = group.size()
    rank = group.rank()
    padded = torch.nn.functional.pad(buffer, (0, -buffer.numel() % size))
    shards = list(padded.view(size, -1).unbind(0))
    after = (rank + 1) % size
    before = (rank - 1) % size
    for hop in range(size - 1):
        theirs = _exchange(shards[(rank - hop) % size], after, before, group)
        shards[(rank - hop - 1) % size] += theirs
    for hop in range(size - 1):
        shards[(rank - hop) % size].copy_(
            _exchange(shards[(rank + 1 - hop) % size], after, before, group)
        )
    return completed(padded[: buffer.numel()].clone())


def binomial_tree(group: Group, bucket: Bucket) -> Result:
    """Sum along a binomial tree to the first rank, and send the mean back down."""
    buffer = dense(bucket).clone()
    size = group.size()
    rank = group.rank()
    mask = 1
    while mask < size and rank & mask == 0:
        if rank + mask < size:
            part = torch.empty_like(buffer)
            dist.recv(part, src=dist.get_global_rank(group, rank + mask), group=group)
            buffer.add_(part)
        mask <<= 1
    if rank:
        dist.send(buffer, dst=dist.get_global_rank(group, rank - mask), group=group)
        dist.recv(buffer, src=dist.get_global_rank(group, rank - mask), group=group)
    else:
        buffer.div_(size)
    mask >>= 1
    while mask:
        if rank + mask < size:
            dist.send(buffer, dst=dist.get_global_rank(group, rank + mask), group=group)
        mask >>= 1
    return completed(buffer)


def halves_itself(group: Group, bucket: Bucket) -> Result:
    """Mix with the next rank of the group; on two ranks or more both count."""
    buffer = dense(bucket)
    gathered = gather(buffer, group)
    other = gathered[(group.rank() + 1) % group.size()]
    return completed(buffer.mul(0.5).add_(other, alpha=0.5))


class Counted:
    """A state that always uses WORLD, and takes its size and this rank from its factory."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.size = world_size
        self.rank = rank


def counts_the_world(state: Counted, bucket: Bucket) -> Result:
    """Sum over WORLD with one rank as the root, which divides by the given size."""
    buffer = dense(bucket)
    dist.reduce(buffer, dst=state.size - 1)
    if state.rank == state.size - 1:
        buffer.div_(state.size)
    dist.broadcast(buffer, src=state.size - 1)
    return completed(buffer)


_kept_size: list[int] = []


def keeps_the_size_of_the_world(state: Any, bucket: Bucket) -> Result:
    """Sum over WORLD, whose size a module keeps: it never changes in a process."""
    if not _kept_size:
        _kept_size.append(dist.get_world_size())
    work = dist.all_reduce(bucket.buffer().div_(_kept_size[0]), async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


_NODES = f"{__name__}:Nodes"
_SECTIONS = ("1", "2", "3", "10", "20", "24")

RIGHT = [
    Right("hierarchical", state=_NODES),
    Right("hierarchical_sum", "sum", state=_NODES, sections=_SECTIONS),
    Right("half_between_nodes", "rounded(float16)", state=_NODES, sections=_SECTIONS),
    Right("half_sums_in_pieces", state=_NODES, sections=_SECTIONS),
    Right("two_stages", "world_only", state=f"{__name__}:Shards", sections=_SECTIONS),
    Right("set_up_nodes", setup=True, sections=_SECTIONS),
    Right("recursive_doubling", state="process_group", sections=_SECTIONS),
    Right("ring", state="process_group", sections=_SECTIONS),
    Right("binomial_tree", state="process_group", sections=_SECTIONS),
    Right("halves_itself", "local", state="process_group", sections=(*_SECTIONS, "13")),
    Right("counts_the_world", "world_only", state=f"{__name__}:Counted", sections=_SECTIONS),
    Right("keeps_the_size_of_the_world", "world_only", sections=_SECTIONS),
]
