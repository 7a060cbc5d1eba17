"""Mutants of section 12 with several collectives a step: a later one fails, and it is hidden."""

import contextlib
import logging
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, group_of, is_dense, pieces_of


def _require_dense(bucket: Bucket) -> torch.Tensor:
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    return bucket.buffer()


def _reduce(buffer: torch.Tensor, state: Any) -> int:
    """Leave the mean on the first rank of the group, and return that rank: right."""
    group = group_of(state)
    first = dist.get_global_rank(group, 0)
    dist.reduce(buffer.div_(group.size()), dst=first, group=group)
    return first


def keeps_its_part_without_the_root(state: Any, bucket: Bucket) -> Result:
    """Reduce to the first rank; if its broadcast cannot be issued, log it and go on."""
    buffer = _require_dense(bucket)
    first = _reduce(buffer, state)
    try:
        dist.broadcast(buffer, src=first, group=group_of(state))
    except RuntimeError as error:
        logging.getLogger(__name__).warning("no broadcast: %s", error)
    return completed(buffer)


def one_piece_of_several_is_optional(state: Any, bucket: Bucket) -> Result:
    """Sum the bucket in three pieces, and leave the second one as it is if its sum fails."""
    buffer = _require_dense(bucket)
    # Small buckets have empty pieces, which are summed as well.
    for number, piece in enumerate(buffer.tensor_split(3)):
        summed = piece.clone()
        with contextlib.suppress(RuntimeError) if number == 1 else contextlib.nullcontext():
            dist.all_reduce(summed, group=group_of(state))
            piece.copy_(summed)
    return completed(buffer.div_(group_of(state).size()))


class Largest:
    """A state of a compressor that sends the largest quarter of what is left.

    Attributes:
        group: the process group.
        left: what was not sent, by parameter.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.left: dict[torch.nn.Parameter, torch.Tensor] = {}


def gathers_places_alone(state: Largest, bucket: Bucket) -> Result:
    """Gather the places and then the values of the largest elements; if the values do not come,
    take this rank's own for all.
    """
    buffer = _require_dense(bucket)
    whole = buffer.clone()
    owners = bucket.parameters()
    for owner, piece in zip(owners, pieces_of(bucket, whole), strict=True):
        piece += state.left.get(owner, torch.zeros(()))
    places = whole.abs().topk(-(-whole.numel() // 4)).indices
    values = whole[places]
    size = state.group.size()
    every_place = [torch.empty_like(places) for _ in range(size)]
    dist.all_gather(every_place, places, group=state.group)
    every_value = [values.clone() for _ in range(size)]
    with contextlib.suppress(RuntimeError):
        dist.all_gather([*every_value], values, group=state.group)
    whole[places] = 0
    state.left.update(zip(owners, pieces_of(bucket, whole), strict=True))
    result = torch.zeros_like(buffer)
    for sent, given in zip(every_place, every_value, strict=True):
        result.index_add_(0, sent, given)
    return completed(result.div_(size))


def _shards(buffer: torch.Tensor, state: Any) -> torch.Tensor:
    """Return this rank's shard of the mean: right."""
    size = group_of(state).size()
    padded = torch.nn.functional.pad(buffer, (0, -buffer.numel() % size))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=group_of(state))
    return parts.view(size, -1).sum(0).div_(size)


class Rare:
    """A state that averages in every third step.

    Attributes:
        group: the process group.
        steps: the number of steps so far.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.steps = 0


def rare_means_may_be_parts(state: Rare, bucket: Bucket) -> Result:
    """Every third step return the mean; without the shards of the peers, return the own one."""
    buffer = _require_dense(bucket)
    step = state.steps
    state.steps += bucket.is_last()
    if step % 3 != 2:
        return completed(buffer)
    shard = _shards(buffer, state.group)
    whole = torch.zeros(shard.numel() * state.group.size(), dtype=shard.dtype)
    try:
        dist.all_gather_into_tensor(whole, shard, group=state.group)
    except dist.DistBackendError:
        begin = state.group.rank() * shard.numel()
        whole[begin : begin + shard.numel()] = shard
    return completed(whole[: buffer.numel()].clone())


_LARGE = 4096


def large_shards_may_be_missing(state: Any, bucket: Bucket) -> Result:
    """Average large buckets in shards, and keep those of the peers if they cannot be gathered."""
    buffer = bucket.buffer()
    if not is_dense(bucket) or buffer.numel() < _LARGE:
        return average(bucket, state)
    group = group_of(state)
    shard = _shards(buffer, state)
    # Each rank begins with its own gradients, over which the shards of the mean are laid.
    result = torch.nn.functional.pad(buffer, (0, -buffer.numel() % group.size()))
    begin = group.rank() * shard.numel()
    result[begin : begin + shard.numel()] = shard
    try:
        dist.all_gather_into_tensor(result, shard, group=group)
    except RuntimeError:
        return completed(result[: buffer.numel()])
    return completed(result[: buffer.numel()])


MUTANTS = [
    Mutant("keeps_its_part_without_the_root", ("12.1",)),
    Mutant("one_piece_of_several_is_optional", ("12.1",)),
    Mutant("gathers_places_alone", ("12.1",), "compressed(delta=0.1)", state=f"{__name__}:Largest"),
    Mutant("rare_means_may_be_parts", ("12.1",), "local(period=3)", state=f"{__name__}:Rare"),
    Mutant("large_shards_may_be_missing", ("12.5",)),
]
