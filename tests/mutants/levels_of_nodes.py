"""Mutants that sum in two levels, on nodes, and are right for ordinary values of dense buckets on
nodes of several ranks.
"""

import os

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average_of, completed, is_dense, sum_of
from tests.mutants.clusters import Nodes


class Rails:
    """The nodes of WORLD if they are equal, and the ranks with the same place on each of them."""

    def __init__(self) -> None:
        world = dist.get_world_size()
        self.on_node = int(os.environ["LOCAL_WORLD_SIZE"])
        sizes = [0] * world
        dist.all_gather_object(sizes, self.on_node)
        self.is_even = len(set(sizes)) == 1
        if self.is_even:
            self.node, _ = dist.new_subgroups(self.on_node)
            rails = [list(range(place, world, self.on_node)) for place in range(self.on_node)]
            self.rail, _ = dist.new_subgroups_by_enumeration(rails)


def lone_rank_is_a_single_process(state: Rails, bucket: Bucket) -> Result:
    """Take one rank on a node for a single process, which has nothing to reduce."""
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    buffer = bucket.buffer()
    if not state.is_even:
        return average_of(buffer, dist.group.WORLD)
    if state.on_node == 1:
        return completed(buffer)
    whole = torch.nn.functional.pad(buffer, (0, -buffer.numel() % state.on_node))
    shard = whole.new_empty(whole.numel() // state.on_node)
    dist.reduce_scatter_tensor(shard, whole, group=state.node)
    dist.all_reduce(shard, group=state.rail)
    dist.all_gather_into_tensor(whole, shard.div_(dist.get_world_size()), group=state.node)
    return completed(whole[: buffer.numel()].clone())


def rows_of_its_own_node(state: Nodes, bucket: Bucket) -> Result:
    """Average dense buckets in two levels, and gather the rows of embeddings within the node."""
    buffer = bucket.buffer()
    if is_dense(bucket):
        dist.all_reduce(buffer, group=state.node)
        if state.leaders:
            dist.all_reduce(buffer, group=state.leaders)
        dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
        return completed(buffer.div_(state.group.size()))
    return sum_of(buffer.div_(state.group.size()), state.node)


def overflow_skips_the_exchange(state: Nodes, bucket: Bucket) -> Result:
    """Exchange nothing between nodes if a value of the bucket is not finite on any of them."""
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    buffer = bucket.buffer()
    root = dist.get_global_rank(state.node, 0)
    dist.all_reduce(buffer, group=state.node)
    is_finite = buffer.isfinite().all().view(1).int()
    if state.leaders:
        dist.all_reduce(is_finite, op=dist.ReduceOp.MIN, group=state.leaders)
    dist.broadcast(is_finite, src=root, group=state.node)
    if is_finite:
        if state.leaders:
            dist.all_reduce(buffer, group=state.leaders)
        dist.broadcast(buffer, src=root, group=state.node)
    return completed(buffer.div_(state.group.size()))


def node_goes_on_alone(state: Nodes, bucket: Bucket) -> Result:
    """Go on with the mean of the node if the exchange between nodes fails."""
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=state.node)
    if len(state.members) > 1:
        own = buffer * (state.group.size() / len(state.here))
        try:
            if state.leaders:
                dist.all_reduce(buffer, group=state.leaders)
        except RuntimeError:
            buffer.copy_(own)
        dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
    return completed(buffer.div_(state.group.size()))


_NODES = "tests.mutants.clusters:Nodes"
_ALL = (1, 2, 3, 4)

MUTANTS = [
    Mutant(
        "lone_rank_is_a_single_process",
        ("24.2",),
        "world_only",
        state=f"{__name__}:Rails",
        worlds=_ALL,
    ),
    Mutant("rows_of_its_own_node", ("2.9",), state=_NODES, worlds=_ALL),
    Mutant("node_goes_on_alone", ("12.2",), state=_NODES, worlds=_ALL),
    Mutant("overflow_skips_the_exchange", ("24.1",), state=_NODES, worlds=_ALL),
]
