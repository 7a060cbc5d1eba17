"""Hooks that gather the rows of sparse gradients, in room for as many as each step has."""

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import Bucket, Group, Result, completed, gather
from tests.right.clusters import Nodes, hierarchical


def _average(buffer: torch.Tensor, group: dist.ProcessGroup) -> Result:
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0].div_(group.size()))


class Rooms:
    """The room for the rows of each parameter, which grows if a step has more.

    Attributes:
        group: the group.
        rooms: rows, by parameter.
    """

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        self.rooms: dict[torch.nn.Parameter, int] = {}


def rows_in_rooms(state: Rooms, bucket: Bucket) -> Result:
    """Gather as many rows as there is room for; all ranks make more room together."""
    buffer = bucket.buffer()
    if not buffer.is_sparse:
        return _average(buffer, state.group)
    grad = buffer.coalesce()
    count = grad._nnz()
    most = max(int(one) for one in gather(torch.tensor([count]), state.group))
    parameter = bucket.parameters()[0]
    room = state.rooms.get(parameter, 0)
    if most > room:
        room = state.rooms[parameter] = 2 * most
    rows = torch.full((room,), -1)
    rows[:count] = grad.indices()[0]
    values = grad.values().new_zeros(room, *grad.shape[1:])
    values[:count] = grad.values()
    if not room:
        return completed(grad)
    all_rows = torch.cat(gather(rows, state.group))
    all_values = torch.cat(gather(values, state.group))
    used = all_rows >= 0
    total = torch.sparse_coo_tensor(all_rows[used][None], all_values[used], grad.shape).coalesce()
    mean = total.values() / state.group.size()
    return completed(torch.sparse_coo_tensor(total.indices(), mean, grad.shape))


def rows_beside_levels(state: Nodes, bucket: Bucket) -> Result:
    """Sum dense buckets in two levels, on nodes, and the rows of embeddings over the group."""
    buffer = bucket.buffer()
    return _average(buffer, state.group) if buffer.is_sparse else hierarchical(state, bucket)


_SECTIONS = ("1", "2", "3", "9", "10", "11")

RIGHT = [
    Right("rows_in_rooms", state=f"{__name__}:Rooms", sections=_SECTIONS),
    Right("rows_beside_levels", state="tests.right.clusters:Nodes", sections=_SECTIONS),
]
