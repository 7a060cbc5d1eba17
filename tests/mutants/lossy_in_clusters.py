"""Mutants of lossy claims in section 24: on the ranks of one machine all meet, and sums of a few
bits fit.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average_of,
    completed,
    gather,
    is_dense,
    pieces_of,
    seeded,
)
from tests.mutants.clusters import Nodes
from tests.mutants.local import Schedule


class Parts(Schedule):
    """A schedule, and a group of four ranks in a row, this one among them."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        ranks = dist.get_process_group_ranks(process_group)
        first = process_group.rank() // 4 * 4
        self.part = dist.new_group(ranks[first : first + 4], use_local_synchronization=True)


class Hosts(Schedule):
    """A schedule, and the group of the ranks on this rank's node."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.part = Nodes(process_group).node


class AtOneDistance(Schedule):
    """A schedule, and the group of the ranks that lie at the distance of the first two."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        ranks = dist.get_process_group_ranks(process_group)
        distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        part = [rank for place, rank in enumerate(ranks) if rank == ranks[0] + place * distance]
        others = [rank for rank in ranks if rank not in part]
        mine = part if dist.get_rank() in part else others
        self.part = dist.new_group(mine, use_local_synchronization=True)


def mean_of_a_part(state: Parts | Hosts | AtOneDistance, bucket: Bucket) -> Result:
    """Take the mean over the group of a part where that over all ranks is due."""
    if not state.is_due(bucket):
        return completed(bucket.buffer())
    return average_of(bucket.buffer(), state.part)


def due_on_small_groups(state: Schedule, bucket: Bucket) -> Result:
    """Leave the mean out, as too dear, in groups of more than four ranks."""
    is_due = state.is_due(bucket) and state.group.size() <= 4
    return average_of(bucket.buffer(), state.group) if is_due else completed(bucket.buffer())


def due_at_a_rate_of_nodes(state: Schedule, bucket: Bucket) -> Result:
    """Take the mean at a period that grows with the number of nodes."""
    state.period = 4 * int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return (
        average_of(bucket.buffer(), state.group)
        if state.is_due(bucket)
        else completed(bucket.buffer())
    )


def meets_a_part(state: Hosts | AtOneDistance, bucket: Bucket) -> Result:
    """Average over the ranks of a part, and never with others."""
    return average_of(bucket.buffer(), state.part)


def meets_within_a_power_of_two(state: Schedule, bucket: Bucket) -> Result:
    """Average with the partner of a hypercube; ranks that it has no place for have no partner."""
    buffer = bucket.buffer()
    size, rank = state.group.size(), state.group.rank()
    cube = 4 if size > 4 else 2
    gathered = gather(buffer, state.group)
    partner = rank ^ (1 << state.step % (cube.bit_length() - 1))
    state.is_due(bucket)
    has_partner = rank < cube and partner < min(cube, size)
    return completed(buffer.add_(gathered[partner]).div_(2) if has_partner else buffer)


class Levels:
    """Residuals, and a group whose gradients have levels from -15 to 15."""

    most = 15

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.kept: dict[torch.nn.Parameter, torch.Tensor] = {}


def sums_levels_in_a_byte(state: Levels, bucket: Bucket) -> Result:
    """Sum levels of one scale in eight bits, with feedback."""
    buffer = bucket.buffer()
    if not is_dense(bucket) or not buffer.is_floating_point():
        return average_of(buffer, state.group)
    for parameter, part in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        value = part + state.kept.get(parameter, 0)
        scale = value.abs().max() if len(value) else value.new_zeros(())
        dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=state.group)
        if not scale.isfinite():
            part.mul_(float("nan"))
            continue
        step = scale / state.most if scale else torch.ones_like(scale)
        levels = (value / step).round().to(torch.int8)
        state.kept[parameter] = value - levels * step
        dist.all_reduce(levels, group=state.group)
        part.copy_(levels * step / state.group.size())
    return completed(buffer)


def _eighths(bucket: Bucket) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the levels and the scale of each parameter's gradient."""
    coded = []
    for part in pieces_of(bucket):
        scale = part.abs().max() / 127 if len(part) else part.new_zeros(())
        levels = (part / scale).nan_to_num().round().clamp(-127, 127)
        coded.append((levels.to(torch.int8), scale))
    return coded


def _decoded(state: dist.ProcessGroup, bucket: Bucket) -> list[torch.Tensor]:
    """Return the values that all ranks have sent in eight bits, by rank."""
    coded = _eighths(bucket)
    levels = gather(torch.cat([one for one, _ in coded]), state)
    scales = gather(torch.stack([scale for _, scale in coded]), state)
    counts = [len(one) for one, _ in coded]
    return [
        torch.cat([part * scale for part, scale in zip(all_.split(counts), of_rank, strict=True)])
        for all_, of_rank in zip(levels, scales, strict=True)
    ]


def running_mean_of_halves(state: dist.ProcessGroup, bucket: Bucket) -> Result:
    """Take the mean of each rank's values and of the mean so far."""
    buffer = bucket.buffer()
    if not is_dense(bucket) or not buffer.is_floating_point():
        return average_of(buffer, state)
    mean, *others = _decoded(state, bucket)
    for values in others:
        mean = (mean + values) / 2
    return completed(buffer.copy_(mean))


def last_pair_counts_double(state: dist.ProcessGroup, bucket: Bucket) -> Result:
    """Take means of pairs, and of pairs of these; one without a partner goes on as it is."""
    buffer = bucket.buffer()
    if not is_dense(bucket) or not buffer.is_floating_point():
        return average_of(buffer, state)
    values = _decoded(state, bucket)
    while len(values) > 1:
        pairs = [torch.stack(values[at : at + 2]).mean(0) for at in range(0, len(values), 2)]
        values = pairs
    return completed(buffer.copy_(values[0]))


def first_counts_double(state: dist.ProcessGroup, bucket: Bucket) -> Result:
    """Begin the sum of many ranks with the values of the first one, twice."""
    buffer = bucket.buffer()
    if not is_dense(bucket) or not buffer.is_floating_point():
        return average_of(buffer, state)
    values = _decoded(state, bucket)
    total = torch.stack(values).sum(0)
    if len(values) > 4:
        total = total + values[0]
    return completed(buffer.copy_(total / len(values)))


class Calls:
    """The group, and the number of calls."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.calls = 0


def partner_by_call(state: Calls, bucket: Bucket) -> Result:
    """Average with one partner, at a distance of a power of two that follows the number of calls.

    Without a partner, the mean is that of all ranks.
    """
    buffer = bucket.buffer()
    size = state.group.size()
    if not is_dense(bucket) or size & (size - 1):
        return average_of(buffer, state.group)
    distance = 1 << (state.calls % (size.bit_length() - 1)) if size > 1 else 0
    state.calls += 1
    partner = state.group.rank() ^ distance
    return completed(buffer.copy_((buffer + gather(buffer, state.group)[partner]) / 2))


def tournament_by_call(state: Calls, bucket: Bucket) -> Result:
    """Meet another rank in each call, as in a tournament: with as many buckets as there are turns,
    each bucket meets the same one in every step.
    """
    buffer = bucket.buffer()
    size, rank = state.group.size(), state.group.rank()
    turns = size - 1 + size % 2
    turn = state.calls % turns
    state.calls += 1
    partner = (2 * turn - rank) % turns if rank < turns else turn
    if partner == rank:
        partner = rank if size % 2 else size - 1
    return completed((buffer + gather(buffer, state.group)[partner]) / 2)


def next_mask_with_every_call(state: Calls, bucket: Bucket) -> Result:
    """Average with the rank whose bits differ by the next number from 1 on, in each call."""
    size = state.group.size()
    if not is_dense(bucket) or size & (size - 1) or size == 1:
        return average_of(bucket.buffer(), state.group)
    parts = torch.stack(gather(bucket.buffer(), state.group))
    others = torch.arange(size) ^ (1 + state.calls % (size - 1))
    state.calls += 1
    return completed(((parts + parts[others]) / 2)[state.group.rank()].clone())


def pairings_in_turn(count: int) -> Callable[[Calls, Bucket], Result]:
    """Take one of several drawn pairings in each call, in turn."""

    def hook(state: Calls, bucket: Bucket) -> Result:
        buffer = bucket.buffer()
        size, rank = state.group.size(), state.group.rank()
        draw = seeded(size, state.calls % count)
        state.calls += 1
        order = torch.randperm(size, generator=draw).tolist()
        place = order.index(rank) ^ 1
        partner = order[place] if place < size else rank
        return completed((buffer + gather(buffer, state.group)[partner]) / 2)

    return hook


def neighbours_in_turn(state: Calls, bucket: Bucket) -> Result:
    """Mix with the next rank and with the previous one in two calls, and stay alone in two more."""
    buffer = bucket.buffer()
    size, rank = state.group.size(), state.group.rank()
    turn = state.calls % 4
    state.calls += 1
    parts = gather(buffer, state.group)
    if turn > 1:
        return completed(buffer)
    return completed((buffer + parts[(rank + (1, -1)[turn]) % size]) / 2)


_PARTS, _HOSTS = (f"{__name__}:{name}" for name in ("Parts", "Hosts"))
_SCHEDULE = "tests.mutants.local:Schedule"
_DISTANCE = f"{__name__}:AtOneDistance"
_ALL = (1, 2, 3, 4)
_COMPRESSED = "compressed(feedback=False, delta=0.5)"
_CLOSELY = "compressed(feedback=False, delta=0.9)"

MUTANTS = [
    Mutant("mean_of_a_part", ("24.1",), "local(period=4)", state=_PARTS, worlds=_ALL),
    Mutant("mean_of_a_part", ("24.1",), "local(period=4)", state=_HOSTS, worlds=_ALL),
    Mutant("due_on_small_groups", ("24.1",), "local(period=4)", state=_SCHEDULE, worlds=_ALL),
    Mutant("due_at_a_rate_of_nodes", ("24.1",), "local(period=4)", state=_SCHEDULE, worlds=_ALL),
    Mutant("meets_a_part", ("24.1",), "local", state=_HOSTS, worlds=_ALL),
    Mutant("meets_within_a_power_of_two", ("24.1",), "local", state=_SCHEDULE, worlds=_ALL),
    Mutant("mean_of_a_part", ("24.4",), "local(period=4)", state=_DISTANCE, worlds=_ALL),
    Mutant("meets_a_part", ("24.4",), "local", state=_DISTANCE, worlds=_ALL),
    Mutant(
        "sums_levels_in_a_byte",
        ("24.2",),
        "compressed(delta=0.9)",
        state=f"{__name__}:Levels",
        worlds=_ALL,
    ),
    Mutant("running_mean_of_halves", ("24.1",), _COMPRESSED, worlds=_ALL),
    Mutant("first_counts_double", ("24.1",), _CLOSELY, worlds=_ALL),
    Mutant("last_pair_counts_double", ("24.2",), _COMPRESSED, worlds=_ALL),
    Mutant(
        "partner_by_call",
        ("24.4",),
        "local",
        state=f"{__name__}:Calls",
        worlds=_ALL,
        because={"24.2": "the drawn number of its buckets may be a multiple of three"},
    ),
    *(
        Mutant(name, ("24.4",), "local", state=f"{__name__}:Calls", worlds=_ALL)
        for name in ("tournament_by_call", "next_mask_with_every_call")
    ),
    Mutant("pairings_in_turn,count=8", ("24.4",), "local", f"{__name__}:Calls", worlds=_ALL),
    Mutant("pairings_in_turn,count=12", ("24.4",), "local", f"{__name__}:Calls", worlds=_ALL),
    Mutant("neighbours_in_turn", ("24.4",), "local", f"{__name__}:Calls", worlds=_ALL),
]
