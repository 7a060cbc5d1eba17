"""Mutants of section 24 that sum by nodes for half precision alone, or piece by piece."""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, is_dense
from tests.mutants.clusters import Nodes, mean_of_node_means, node_means_of_part_of_the_world

_HALVES = (torch.float16, torch.bfloat16)
_PIECE = 1 << 15


def _is_half(bucket: Bucket) -> bool:
    return is_dense(bucket) and bucket.buffer().dtype in _HALVES


def node_means_of_halves(state: Nodes, bucket: Bucket) -> Result:
    """Take the mean of the nodes' means in half precision, and the mean of all ranks else."""
    if _is_half(bucket):
        return mean_of_node_means(state, bucket)
    return average(bucket, state.group)


def node_means_of_float64(state: Nodes, bucket: Bucket) -> Result:
    """Take the mean of the nodes' means in float64, and the mean of all ranks else."""
    if is_dense(bucket) and bucket.buffer().dtype == torch.float64:
        return mean_of_node_means(state, bucket)
    return average(bucket, state.group)


def node_means_of_halves_of_a_group(state: Nodes, bucket: Bucket) -> Result:
    """Weigh the nodes of a group alike in half precision, if WORLD's nodes are equal."""
    if _is_half(bucket):
        return node_means_of_part_of_the_world(state, bucket)
    return average(bucket, state.group)


def pieces_through_one_buffer(state: Nodes, bucket: Bucket) -> Result:
    """Sum by equal nodes, piece by piece through one buffer: the next piece is copied into it while
    the sum of the one before is under way between nodes.
    """
    sizes = {len(node) for node in state.members}
    if not is_dense(bucket) or len(state.members) == 1 or len(sizes) > 1:
        return average(bucket, state.group)
    buffer = bucket.buffer()
    staged = torch.empty_like(buffer[:_PIECE])
    under_way = []
    for piece in buffer.split(_PIECE):
        part = staged[: len(piece)].copy_(piece)
        dist.all_reduce(part, group=state.node)
        work = state.leaders and dist.all_reduce(part, group=state.leaders, async_op=True)
        under_way.append((piece, part, work))
    for piece, part, work in under_way:
        if work is not None:
            work.wait()
        piece.copy_(part)
    dist.broadcast(buffer, src=dist.get_global_rank(state.node, 0), group=state.node)
    return completed(buffer.div_(state.group.size()))


_NODES = "tests.mutants.clusters:Nodes"
_ALL = (1, 2, 3, 4)

MUTANTS = [
    Mutant("node_means_of_halves", ("24.1",), state=_NODES, worlds=_ALL),
    Mutant("node_means_of_float64", ("24.1",), state=_NODES, worlds=_ALL),
    Mutant("node_means_of_halves_of_a_group", ("24.4",), state=_NODES, worlds=_ALL),
    Mutant("pieces_through_one_buffer", ("24.2",), state=_NODES, worlds=_ALL),
]
