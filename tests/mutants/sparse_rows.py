"""Mutants of rule 2.9 that are right for as many rows as in the first step, or on two ranks."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, gather, group_of, is_dense

_rooms: dict[torch.nn.Parameter, int] = {}


def _table(
    rows: torch.Tensor, values: torch.Tensor, shape: torch.Size, divisor: int
) -> torch.Tensor:
    total = torch.sparse_coo_tensor(rows[None], values, shape).coalesce()
    return torch.sparse_coo_tensor(total.indices(), total.values() / divisor, shape)


def room_of_the_first_step(state: Any, bucket: Bucket) -> Result:
    """Gather rows in messages that have room for four times the rows of the first step."""
    if is_dense(bucket):
        return average(bucket, state)
    grad = bucket.buffer().coalesce()
    parameter = bucket.parameters()[0]
    if parameter not in _rooms:
        counts = gather(torch.tensor([grad._nnz()]), state)
        _rooms[parameter] = 4 * max(int(count) for count in counts) + 16
    room = _rooms[parameter]
    used = grad.indices()[0][:room]
    rows = torch.full((room,), -1)
    rows[: len(used)] = used
    values = grad.values().new_zeros(room, *grad.shape[1:])
    values[: len(used)] = grad.values()[:room]
    all_rows = torch.cat(gather(rows, state))
    all_values = torch.cat(gather(values, state))
    is_used = all_rows >= 0
    size = group_of(state).size()
    return completed(_table(all_rows[is_used], all_values[is_used], grad.shape, size))


def _gathered(grad: torch.Tensor, state: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows of each rank, and their values."""
    counts = [int(count) for count in gather(torch.tensor([grad._nnz()]), state)]
    most = max(counts)
    rows = torch.zeros(most, dtype=torch.int64)
    rows[: grad._nnz()] = grad.indices()[0]
    values = grad.values().new_zeros(most, *grad.shape[1:])
    values[: grad._nnz()] = grad.values()
    pairs = zip(gather(rows, state), gather(values, state), strict=True)
    return [(one[:n], other[:n]) for (one, other), n in zip(pairs, counts, strict=True)]


def rows_of_pairs(state: Any, bucket: Bucket) -> Result:
    """Double recursively: a rank sums the rows of the partners that a power of two has."""
    if is_dense(bucket):
        return average(bucket, state)
    grad = bucket.buffer().coalesce()
    group = group_of(state)
    heard = {group.rank()}
    distance = 1
    while distance < group.size():
        heard |= {rank ^ distance for rank in heard if rank ^ distance < group.size()}
        distance *= 2
        if group.rank() ^ distance >= group.size():
            break
    parts = [part for rank, part in enumerate(_gathered(grad, state)) if rank in heard]
    rows = torch.cat([rows for rows, _ in parts])
    values = torch.cat([values for _, values in parts])
    return completed(_table(rows, values, grad.shape, group.size()))


def without_rows_nothing(state: Any, bucket: Bucket) -> Result:
    """Gather rows; if no rank has any, return those of the step before."""
    if is_dense(bucket):
        return average(bucket, state)
    grad = bucket.buffer().coalesce()
    parts = _gathered(grad, state)
    parameter = bucket.parameters()[0]
    if sum(len(rows) for rows, _ in parts):
        _last[parameter] = parts
    parts = _last.get(parameter, parts)
    rows = torch.cat([rows for rows, _ in parts])
    values = torch.cat([values for _, values in parts])
    return completed(_table(rows, values, grad.shape, group_of(state).size()))


_last: dict[torch.nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]] = {}

_ALL = (1, 2, 3, 4)

MUTANTS = [
    Mutant("room_of_the_first_step", ("2.9",), worlds=_ALL),
    Mutant("rows_of_pairs", ("2.9",), worlds=_ALL),
    Mutant("without_rows_nothing", ("2.9",), worlds=_ALL),
]
