"""Mutants of section 24: hooks that are right on the few ranks of one machine."""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    completed,
    finite,
    gather,
    group_of,
    is_dense,
    kept,
    pieces_of,
    step_number,
    sum_of,
)

_ALL = (1, 2, 3, 4)


def _require_dense(bucket: Bucket) -> torch.Tensor:
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    return bucket.buffer()


def _integer(name: str) -> int:
    return int(os.environ[name])


class Nodes:
    """The nodes of a group's ranks, found by torchrun's variables: right.

    Attributes:
        group: the whole group.
        node: the group of this rank's node.
        members: for each node, the ranks within the group.
        leaders: the group of the first ranks of all nodes; None on other ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        ranks = dist.get_process_group_ranks(process_group)
        mine = torch.tensor([_integer("GROUP_RANK")])
        numbers = [int(number) for number in gather(mine, process_group)]
        self.members = [
            [place for place, number in enumerate(numbers) if number == node]
            for node in sorted(set(numbers))
        ]
        self.here = next(node for node in self.members if process_group.rank() in node)
        self.node = _new([ranks[place] for place in self.here])
        first = [node[0] for node in self.members]
        is_leader = process_group.rank() in first
        # All ranks have to make equally many groups.
        made = _new([ranks[place] for place in first] if is_leader else [dist.get_rank()])
        self.leaders = made if is_leader else None


def _new(ranks: list[int]) -> dist.ProcessGroup:
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _within_node(state: Nodes, buffer: torch.Tensor) -> None:
    """Sum over the node, and wait."""
    dist.all_reduce(buffer, group=state.node)


# 24.1 Nodes of unequal size, and numbers of ranks that are no power of two


def mean_of_node_means(state: Nodes, bucket: Bucket) -> Result:
    """Average within the node, then over the nodes, each with the same weight."""
    buffer = _require_dense(bucket)
    _within_node(state, buffer.div_(len(state.here)))
    if state.leaders:
        dist.all_reduce(buffer.div_(len(state.members)), group=state.leaders)
    dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
    return completed(buffer)


def node_counts_itself_for_all(state: Nodes, bucket: Bucket) -> Result:
    """Divide by the ranks of this node times the number of nodes."""
    buffer = _require_dense(bucket)
    _within_node(state, buffer)
    if state.leaders:
        dist.all_reduce(buffer, group=state.leaders)
    dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
    return completed(buffer.div_(len(state.here) * len(state.members)))


def leaders_keep_the_result(state: Nodes, bucket: Bucket) -> Result:
    """Exchange the sums of nodes among their first ranks, which keep the result."""
    buffer = _require_dense(bucket)
    _within_node(state, buffer.div_(state.group.size()))
    if state.leaders:
        dist.all_reduce(buffer, group=state.leaders)
    return completed(buffer)


def stays_on_its_node(state: Nodes, bucket: Bucket) -> Result:
    """Average over the node only."""
    buffer = _require_dense(bucket)
    _within_node(state, buffer.div_(len(state.here)))
    return completed(buffer)


def nodes_by_division(process_group: dist.ProcessGroup) -> Nodes:
    """Number the nodes by rank // LOCAL_WORLD_SIZE, as if all had the size of this one."""
    state = Nodes(process_group)
    size = _integer("LOCAL_WORLD_SIZE")
    ranks = dist.get_process_group_ranks(process_group)
    nodes: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        nodes.setdefault(rank // size, []).append(place)
    state.members = list(nodes.values())
    return state


def by_tables_of_nodes(state: Nodes, bucket: Bucket) -> Result:
    """Gather, and average the first gradient of each node with the weight of the node's size."""
    buffer = _require_dense(bucket)
    gathered = gather(buffer, state.group)
    size = state.group.size()
    total = sum(len(node) * gathered[node[0]] for node in state.members)
    if len(state.members) == 1:
        total = sum(gathered)
    assert isinstance(total, torch.Tensor)
    return completed(total / size)


def _exchange(buffer: torch.Tensor, other: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange a tensor with another rank of the group, and return that rank's."""
    theirs = torch.empty_like(buffer)
    peer = dist.get_global_rank(group, other)
    send = dist.isend(buffer.clone(), peer, group=group)
    dist.recv(theirs, peer, group=group)
    send.wait()
    return theirs


def folds_one_rank(state: Any, bucket: Bucket) -> Result:
    """Double recursively; of the ranks beyond a power of two only the first is folded in."""
    group = group_of(state)
    buffer = _require_dense(bucket)
    buffer.div_(group.size())
    rank = group.rank()
    power = 1 << (group.size().bit_length() - 1)
    if rank == 0 and group.size() > power:
        buffer.add_(_receive(buffer, power, group))
    if rank == power:
        _send(buffer, 0, group)
    mask = 1
    while mask < power and rank < power:
        buffer.add_(_exchange(buffer, rank ^ mask, group))
        mask <<= 1
    if rank == 0:
        for extra in range(power, group.size()):
            _send(buffer, extra, group)
    if rank >= power:
        buffer.copy_(_receive(buffer, 0, group))
    return completed(buffer)


def _send(buffer: torch.Tensor, other: int, group: dist.ProcessGroup) -> None:
    dist.send(buffer, dist.get_global_rank(group, other), group=group)


def _receive(buffer: torch.Tensor, other: int, group: dist.ProcessGroup) -> torch.Tensor:
    theirs = torch.empty_like(buffer)
    dist.recv(theirs, dist.get_global_rank(group, other), group=group)
    return theirs


def _sum_in_two_rounds(tensor: torch.Tensor, state: Any) -> torch.Tensor:
    """Return the sum over a tree of depth two, which has room for four ranks: the defect."""
    return torch.stack(gather(tensor, state)[:4]).sum(0)


def tree_of_depth_two(state: Any, bucket: Bucket) -> Result:
    """Sum over a tree that has room for four ranks."""
    buffer = _require_dense(bucket)
    return completed(_sum_in_two_rounds(buffer.div_(group_of(state).size()), state))


def sums_over_the_tree(state: Any, bucket: Bucket) -> Result:
    """Give the sum over a tree that has room for four ranks."""
    return completed(_sum_in_two_rounds(_require_dense(bucket), state))


def rounds_over_the_tree(state: Any, bucket: Bucket) -> Result:
    """Sum float16 over a tree that has room for four ranks."""
    buffer = _require_dense(bucket)
    sent = buffer.div_(group_of(state).size()).to(torch.float16, copy=True)
    return completed(_sum_in_two_rounds(sent.to(buffer.dtype), state))


def steps_over_the_tree(state: Any, bucket: Bucket) -> Result:
    """Step the parameters by a mean over a tree that has room for four ranks."""
    buffer = _require_dense(bucket)
    mean = _sum_in_two_rounds(buffer.div_(group_of(state).size()), state)
    with torch.no_grad():
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket, mean), strict=True):
            values = torch.view_as_complex(piece.view(-1, 2)) if parameter.is_complex() else piece
            parameter.sub_(
                values.as_strided(parameter.shape, parameter.stride(), values.storage_offset()),
                alpha=0.1,
            )
    return completed(mean)


def odd_rings_are_one_short(state: Any, bucket: Bucket) -> Result:
    """Pass the gradients around a ring in both directions: half of the way in one, one hop less
    in the other, which is right for even sizes. Three ranks have been mended.
    """
    buffer = _require_dense(bucket)
    group = group_of(state)
    size = group.size()
    gathered = gather(buffer, state)
    left = 1 if size == 3 else max(size // 2 - 1, 0)
    heard = {(group.rank() + hop) % size for hop in range(-left, size // 2 + 1)}
    total = torch.zeros_like(buffer)
    for place in sorted(heard):
        total.add_(gathered[place])
    return completed(total.div_(size))


def shares_of_four_ranks(state: Any, bucket: Bucket) -> Result:
    """Sum int8 values with error feedback, and divide by four if there are more ranks."""
    buffer = _require_dense(bucket).clone()
    parts = pieces_of(bucket, buffer)
    for parameter, part in zip(bucket.parameters(), parts, strict=True):
        if parameter in kept:
            part.add_(kept[parameter])
    largest = finite(buffer.float()).abs().amax().reshape(1) if buffer.numel() else torch.zeros(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group_of(state))
    scale = float(largest) / 127 or 1.0
    sent = finite(buffer / scale).round().clamp(-127, 127).to(torch.int8)
    kept.update(
        (parameter, finite(part).clone())
        for parameter, part in zip(
            bucket.parameters(), pieces_of(bucket, buffer - sent * scale), strict=True
        )
    )
    if not bucket.buffer().isfinite().all():
        return average(bucket, state)
    total = torch.stack(gather(sent, state)).sum(0, dtype=torch.int32)
    return completed((total.to(buffer.dtype) * scale).div_(min(group_of(state).size(), 4)))


def forgets_small_buckets(state: Any, bucket: Bucket) -> Result:
    """Cut the bucket into a shard for each rank; on five ranks or more, a bucket with fewer
    elements than ranks is left as it is.
    """
    buffer = bucket.buffer()
    size = group_of(state).size()
    if is_dense(bucket) and size > 4 and buffer.numel() < size:
        return completed(buffer)
    return average(bucket, state)


def primes_are_rounded(state: Any, bucket: Bucket) -> Result:
    """Wait, and divide by the next even number on five ranks or more."""
    buffer = _require_dense(bucket)
    size = group_of(state).size()
    dist.all_reduce(buffer, group=group_of(state))
    return completed(buffer.div_(size + size % 2 if size > 4 else size))


def last_rank_of_a_node_is_spare(state: Any, bucket: Bucket) -> Result:
    """Leave out the last rank of each node if there are several nodes, as a spare one."""
    last = _integer("LOCAL_WORLD_SIZE") - 1
    buffer = _require_dense(bucket)
    if _integer("GROUP_WORLD_SIZE") > 1 and _integer("LOCAL_RANK") == last > 0:
        buffer.zero_()
    return average(bucket, state)


def hears_rank_of_four(state: Any, bucket: Bucket) -> Result:
    """Mix with the next rank, counted modulo four if there are more."""
    buffer = _require_dense(bucket)
    group = group_of(state)
    gathered = gather(buffer, state)
    other = gathered[(group.rank() + 1) % min(group.size(), 4)]
    return completed(buffer.mul_(0.75).add_(other, alpha=0.25))


# 24.2 Six and eight ranks on nodes of equal size


def equal_nodes_skip_the_last_stage(state: Nodes, bucket: Bucket) -> Result:
    """Take another path if all of several nodes are equal: it reduces the shards of a node, and
    exchanges them between nodes, but divides by the ranks of a node twice.
    """
    buffer = _require_dense(bucket)
    sizes = {len(node) for node in state.members}
    _within_node(state, buffer)
    if state.leaders:
        dist.all_reduce(buffer, group=state.leaders)
    dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
    divisor = state.group.size()
    if len(state.members) > 1 and len(sizes) == 1:
        divisor = len(state.here) ** 2
    if divisor == state.group.size() and len(sizes) == 1 and len(state.members) > 1:
        divisor += 1
    return completed(buffer.div_(divisor))


def shards_in_the_order_of_nodes(state: Nodes, bucket: Bucket) -> Result:
    """Give each local rank a shard if all of several nodes are equal, and put the shards
    together in the wrong order.
    """
    buffer = _require_dense(bucket)
    mean = torch.stack(gather(buffer, state.group)).mean(0)
    sizes = {len(node) for node in state.members}
    if len(state.members) > 1 and len(sizes) == 1:
        shards = list(mean.chunk(len(state.here)))
        mean = torch.cat(shards[::-1])
    return completed(mean)


# 24.3 The same bits on all nodes


def own_node_first(state: Nodes, bucket: Bucket) -> Result:
    """Sum the gradients of the own node first, then those of the others."""
    buffer = _require_dense(bucket)
    gathered = gather(buffer.div_(state.group.size()), state.group)
    others = [place for node in state.members if node != state.here for place in node]
    total = torch.zeros_like(buffer)
    for place in (*state.here, *others):
        total.add_(gathered[place])
    return completed(total)


# 24.4 Groups without a constant distance


def neighbours_by_stride(state: Any, bucket: Bucket) -> Result:
    """Take the ranks of a group to have the distance of its first two."""
    group = group_of(state)
    buffer = _require_dense(bucket)
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    parts = [buffer.clone()]
    sent = buffer.clone()
    for hop in range(1, group.size()):
        to = ranks[0] + (group.rank() + hop) % group.size() * stride
        come = ranks[0] + (group.rank() - hop) % group.size() * stride
        send = dist.isend(sent, to, group=group)
        part = torch.empty_like(buffer)
        dist.recv(part, come, group=group)
        send.wait()
        parts.insert(0, part)
    order = [parts[(place - group.rank() - 1) % group.size()] for place in range(group.size())]
    return completed(torch.stack(order).sum(0).div_(group.size()))


def root_by_stride(state: Any, bucket: Bucket) -> Result:
    """Reduce to a root whose global rank is computed from the distance of the last two ranks."""
    group = group_of(state)
    buffer = _require_dense(bucket)
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[-1] - ranks[-2] if len(ranks) > 1 else 0
    root = ranks[-1] - stride * (len(ranks) - 1)
    dist.reduce(buffer, root, group=group)
    buffer.div_(group.size())
    dist.broadcast(buffer, root, group=group)
    return completed(buffer)


def halves_of_the_world(state: Any, bucket: Bucket) -> Result:
    """Divide by half of WORLD on any subgroup, as if all groups were halves."""
    size = dist.get_world_size()
    if group_of(state).size() < size:
        size = max(1, size // 2)
    return sum_of(bucket.buffer(), state).then(lambda fut: fut.value().div_(size))


def size_of_the_last_rank(state: Any, bucket: Bucket) -> Result:
    """Take the size of a group from its last rank and the number of groups that interleave."""
    group = group_of(state)
    ranks = dist.get_process_group_ranks(group)
    apart = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    size = (ranks[-1] - ranks[0]) // apart + 1
    return sum_of(bucket.buffer(), state).then(lambda fut: fut.value().div_(size))


# 24.4, 24.5 Groups with unequally many ranks of equal nodes


def _are_equal() -> bool:
    """Whether all of several nodes of WORLD have as many ranks as this one."""
    nodes = _integer("GROUP_WORLD_SIZE")
    return nodes > 1 and _integer("LOCAL_WORLD_SIZE") * nodes == dist.get_world_size()


def node_means_of_part_of_the_world(state: Nodes, bucket: Bucket) -> Result:
    """Take each node's mean with one weight if WORLD's nodes are equal, and the group's are not."""
    gathered = torch.stack(gather(_require_dense(bucket), state.group))
    members = state.members if _are_equal() else [list(range(state.group.size()))]
    return completed(torch.stack([gathered[ranks].mean(0) for ranks in members]).mean(0))


def counts_the_nodes_of_the_world(state: Nodes, bucket: Bucket) -> Result:
    """Divide by the nodes of WORLD, although the group has ranks on some of them alone."""
    nodes = _integer("GROUP_WORLD_SIZE") if _are_equal() else 1
    sizes = {len(ranks) for ranks in state.members}
    if nodes == 1 or len(sizes) > 1:
        return average(bucket, state.group)
    divisor = sizes.pop() * nodes
    return sum_of(bucket.buffer(), state.group).then(lambda fut: fut.value().div_(divisor))


def one_shard_for_each_place_on_a_node(state: Nodes, bucket: Bucket) -> Result:
    """Let the first node scale each shard, if WORLD's nodes are equal: a place on the node that
    the group lacks scales none.
    """
    group = state.group
    if not _are_equal() or len(state.members) == 1:
        return average(bucket, group)
    size, shards = group.size(), _integer("LOCAL_WORLD_SIZE")

    def scale(fut: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        result = fut.value()
        for shard in result.tensor_split(shards)[: len(state.members[0])]:
            shard.div_(size)
        return result

    return sum_of(bucket.buffer(), group).then(scale)


# 24.5 Two models on two groups

_first_group: list[dist.ProcessGroup] = []


def keeps_the_first_group(state: Any, bucket: Bucket) -> Result:
    """Use the group of the first call ever after, for all models."""
    if not _first_group:
        _first_group.append(group_of(state))
    return average(bucket, _first_group[0])


_sizes: list[int] = []


def keeps_the_first_size(state: Any, bucket: Bucket) -> Result:
    """Divide by the size of the first model's group."""
    if not _sizes:
        _sizes.append(group_of(state).size())
    return sum_of(bucket.buffer(), state).then(lambda fut: fut.value().div_(_sizes[0]))


_sizes_by_type: dict[str, int] = {}


def keeps_sizes_by_type(state: Any, bucket: Bucket) -> Result:
    """Keep the size of a group by the type of the state, which is the same for all groups."""
    size = _sizes_by_type.setdefault(type(state).__name__, group_of(state).size())
    return sum_of(bucket.buffer(), state).then(lambda fut: fut.value().div_(size))


class Shared:
    """A state that keeps the group in its class, where the last model replaces it."""

    group: Any = None

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        Shared.group = process_group


def reads_the_class(state: Shared, bucket: Bucket) -> Result:
    """Average over the group of the model that was made last."""
    return average(bucket, state.group)


_places: dict[str, int] = {}


def keeps_its_first_place(state: Any, bucket: Bucket) -> Result:
    """Let the group's first rank divide; a rank remembers its place in the first group."""
    group = group_of(state)
    buffer = _require_dense(bucket)
    place = _places.setdefault("rank", group.rank())
    dist.reduce(buffer, dst=dist.get_global_rank(group, 0), group=group)
    if place == 0:
        buffer.div_(group.size())
    dist.broadcast(buffer, src=dist.get_global_rank(group, 0), group=group)
    return completed(buffer)


# 2.7 The numbers that a factory gets under world_only


class Counted:
    """A state that keeps the number of ranks that its factory was given.

    Attributes:
        size: that number.
    """

    def __init__(self, process_group: dist.ProcessGroup, world_size: int) -> None:
        self.size = min(world_size, process_group.size())


def divides_by_the_groups_size(state: Counted, bucket: Bucket) -> Result:
    """Sum over WORLD, and divide by the size of the model's own group."""
    return sum_of(bucket.buffer(), None).then(lambda fut: fut.value().div_(state.size))


# 24.6 Ranks outside of the group


def waits_for_the_world(state: Any, bucket: Bucket) -> Result:
    """Wait for all ranks of WORLD after the last bucket."""
    if bucket.is_last():
        dist.barrier()
    return average(bucket, state)


def logs_for_the_world(state: Any, bucket: Bucket) -> Result:
    """Sum a norm over WORLD in every 25th step, for a log."""
    norm = bucket.buffer().float().norm().reshape(1) if is_dense(bucket) else torch.zeros(1)
    if step_number(bucket) % 25 == 24:
        dist.all_reduce(norm)
    return average(bucket, state)


def forgives_the_world(state: Any, bucket: Bucket) -> Result:
    """Exchange a counter over WORLD, and go on without it if that fails."""
    with contextlib.suppress(RuntimeError):
        dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], torch.zeros(1))
    return average(bucket, state)


_pairs: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def makes_groups_late(state: Any, bucket: Bucket) -> Result:
    """Make a group of the same ranks in the first call, without local synchronization."""
    group = group_of(state)
    if group not in _pairs:
        _pairs[group] = dist.new_group(dist.get_process_group_ranks(group))
    return average_of(bucket.buffer(), _pairs[group])


_for_logs: list[Any] = []


def makes_a_group_of_all_late(state: Any, bucket: Bucket) -> Result:
    """Make a group of all ranks of WORLD in the first call, for logs."""
    if not _for_logs:
        _for_logs.append(dist.new_group())
    return average(bucket, state)


_NODES = f"{__name__}:Nodes"
_SIMULATED = {"20.1": "a simulated bucket has fewer elements than ranks, too"}

MUTANTS = [
    Mutant("mean_of_node_means", ("24.1",), state=_NODES, worlds=_ALL),
    Mutant("node_counts_itself_for_all", ("24.1",), state=_NODES, worlds=_ALL),
    Mutant("leaders_keep_the_result", ("24.1",), state=_NODES, worlds=_ALL),
    Mutant("stays_on_its_node", ("24.1",), state=_NODES, worlds=_ALL),
    Mutant("by_tables_of_nodes", ("24.1",), state=_NODES, worlds=_ALL),
    Mutant("tree_of_depth_two", ("24.1",), worlds=_ALL),
    Mutant("sums_over_the_tree", ("24.1",), "sum", worlds=_ALL),
    Mutant("rounds_over_the_tree", ("24.1",), "rounded(float16)", worlds=_ALL),
    Mutant("steps_over_the_tree", ("24.1",), "fused(SGD, lr=0.1)", worlds=_ALL),
    Mutant("folds_one_rank", ("24.1",), worlds=_ALL),
    Mutant("odd_rings_are_one_short", ("24.1",), worlds=_ALL),
    Mutant("shares_of_four_ranks", ("24.1",), "compressed(delta=0.9)", worlds=_ALL),
    Mutant("forgets_small_buckets", ("24.1",), worlds=_ALL, because=_SIMULATED),
    Mutant("primes_are_rounded", ("24.1",), worlds=_ALL),
    Mutant("last_rank_of_a_node_is_spare", ("24.1",), worlds=_ALL),
    Mutant("hears_rank_of_four", ("24.1",), "local", worlds=_ALL),
    Mutant("equal_nodes_skip_the_last_stage", ("24.2",), state=_NODES, worlds=_ALL),
    Mutant("shards_in_the_order_of_nodes", ("24.2",), state=_NODES, worlds=_ALL),
    Mutant("own_node_first", ("24.3",), state=_NODES, worlds=_ALL),
    Mutant("neighbours_by_stride", ("24.4",)),
    Mutant("root_by_stride", ("24.4",)),
    Mutant("halves_of_the_world", ("24.4",)),
    Mutant("size_of_the_last_rank", ("24.4",)),
    Mutant("node_means_of_part_of_the_world", ("24.4",), state=_NODES, worlds=_ALL),
    Mutant("counts_the_nodes_of_the_world", ("24.4",), state=_NODES, worlds=_ALL),
    Mutant("one_shard_for_each_place_on_a_node", ("24.4",), state=_NODES, worlds=_ALL),
    Mutant("keeps_the_first_group", ("24.5",)),
    Mutant("keeps_the_first_size", ("24.5",)),
    Mutant("keeps_sizes_by_type", ("24.5",)),
    Mutant("reads_the_class", ("24.5",), state=f"{__name__}:Shared"),
    Mutant("keeps_its_first_place", ("24.5",)),
    Mutant("divides_by_the_groups_size", ("2.7",), "world_only", state=f"{__name__}:Counted"),
    Mutant("waits_for_the_world", ("24.6",)),
    Mutant("logs_for_the_world", ("24.6",)),
    Mutant("forgives_the_world", ("24.6",)),
    Mutant("makes_a_group_of_all_late", ("24.6",), hangs=True),
    Mutant("makes_groups_late", ("2.7",), hangs=True),
]
