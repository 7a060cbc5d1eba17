"""Weighted means of some ranks' gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as _post_local_sgd

from tests.right import COMPRESSORS, Right
from tests.right._common import (
    STATE,
    Bucket,
    Group,
    Result,
    State,
    completed,
    dense,
    gather,
    wide,
)


def _pairs_of(places: list[int], mine: int) -> int:
    """Return the partner of ``mine`` if neighbours in ``places`` are paired.

    An odd one out is its own partner.
    """
    at = places.index(mine) ^ 1
    return places[at] if at < len(places) else mine


def _swap(buffer: torch.Tensor, partner: int, group: Group) -> torch.Tensor:
    theirs = torch.empty_like(buffer)
    peer = dist.get_global_rank(group, partner)
    works = [dist.isend(buffer, peer, group=group), dist.irecv(theirs, peer, group=group)]
    for work in works:
        work.wait()
    return theirs


def ring_gossip(group: Group, bucket: Bucket) -> Result:
    """Average a rank's gradient with those of its left and right neighbours."""
    buffer = dense(bucket)
    size = group.size()
    mine = group.rank()
    if size == 1:
        return completed(buffer)
    left, right = (dist.get_global_rank(group, (mine + step) % size) for step in (-1, 1))
    from_left = torch.empty_like(buffer)
    from_right = torch.empty_like(buffer)
    works = [
        dist.isend(buffer, right, group=group, tag=1),
        dist.isend(buffer, left, group=group, tag=2),
    ]
    works += [
        dist.irecv(from_left, left, group=group, tag=1),
        dist.irecv(from_right, right, group=group, tag=2),
    ]
    for work in works:
        work.wait()
    return completed(((wide(buffer) + from_left + from_right) / 3).to(buffer.dtype))


def random_pairs(state: State, bucket: Bucket) -> Result:
    """Average with a partner that is drawn for every step."""
    partner = _pairs_of(
        torch.randperm(state.group.size(), generator=state.generator()).tolist(), state.group.rank()
    )
    state.count(bucket)
    buffer = dense(bucket)
    return completed(
        buffer
        if partner == state.group.rank()
        else (buffer + _swap(buffer, partner, state.group)) / 2
    )


def every_second_step(state: State, bucket: Bucket) -> Result:
    """Average over all ranks in every second step, and stay local otherwise."""
    together = state.step % 2 == 0
    state.count(bucket)
    buffer = dense(bucket)
    if not together:
        return completed(buffer)
    work = dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


class Hierarchy:
    """Average within nodes of two ranks, and over all ranks in every third step.

    The state can be saved.
    """

    def __init__(self, process_group: Group, node: Group, period: int = 3) -> None:
        self.process_group = process_group
        self.node = node
        self.period = period
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"period": self.period, "step": self.step}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.period = saved["period"]
        self.step = saved["step"]

    def hook(self, state: Any, bucket: Bucket) -> Result:
        group = self.process_group if self.step % self.period == 0 else self.node
        self.step += bucket.is_last()
        buffer = dense(bucket).div_(group.size())
        return (
            dist.all_reduce(buffer, group=group, async_op=True)
            .get_future()
            .then(lambda fut: fut.value()[0])
        )


def _node(process_group: Group) -> Group:
    """Return the group of this rank's pair; the last of an odd number of ranks is alone."""
    first = process_group.rank() // 2 * 2
    places = range(first, min(first + 2, process_group.size()))
    return dist.new_group(
        [dist.get_global_rank(process_group, place) for place in places],
        use_local_synchronization=True,
    )


def hierarchical(process_group: Group) -> Any:
    """Return a hook whose state is resumed from a state_dict."""
    state = Hierarchy(process_group, _node(process_group))
    state.load_state_dict(state.state_dict())
    return None, state.hook


def torch_local_sgd(process_group: Group, alone: bool = False) -> Any:
    """Return torch's own hook: after two steps, the mean over a pair, or no mean if ``alone``."""
    state = _post_local_sgd.PostLocalSGDState(
        process_group, _node(process_group), 2, post_local_gradient_allreduce=not alone
    )
    return state, _post_local_sgd.post_localSGD_hook


# Weights that differ between the buckets of a step


def random_pairs_by_bucket(state: State, bucket: Bucket) -> Result:
    """Average with a partner that is drawn for every bucket."""
    order = torch.randperm(state.group.size(), generator=state.generator(bucket.index())).tolist()
    partner = _pairs_of(order, state.group.rank())
    state.count(bucket)
    buffer = dense(bucket)
    return completed(
        buffer
        if partner == state.group.rank()
        else (buffer + _swap(buffer, partner, state.group)) / 2
    )


class Rotation:
    """A group and the number of the step; in each step all buckets meet the same rank."""

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        self.step = 0

    def partner(self) -> int:
        """Return the rank of this step: all pairs of a tournament come in turn.

        Of an odd number of ranks, one is its own partner.
        """
        size, rank = self.group.size(), self.group.rank()
        turns = max(1, size - 1 + size % 2)
        turn = self.step % turns
        if rank == turns:
            return turn
        partner = (2 * turn - rank) % turns
        return partner if partner != rank or size % 2 else size - 1


def rotating_gossip(state: Rotation, bucket: Bucket) -> Result:
    """Average with the partner of the step."""
    partner = state.partner()
    state.step += bucket.is_last()
    buffer = dense(bucket)
    if partner == state.group.rank():
        return completed(buffer)
    return completed((buffer + _swap(buffer, partner, state.group)) / 2)


def every_second_bucket(state: State, bucket: Bucket) -> Result:
    """Average even buckets in even steps, and odd buckets in odd steps.

    All other buckets stay local.
    """
    together = (state.step + bucket.index()) % 2 == 0
    state.count(bucket)
    buffer = dense(bucket)
    if not together:
        return completed(buffer)
    work = dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def every_24th_step(state: State, bucket: Bucket) -> Result:
    """Average over all ranks in the last of 24 steps, as rarely as the claim allows."""
    together = state.step % 24 == 23
    state.count(bucket)
    buffer = dense(bucket)
    if not together:
        return completed(buffer)
    work = dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def one_bucket_in_four_steps(state: State, bucket: Bucket) -> Result:
    """Mix each bucket with the previous rank in every fourth step, buckets in turn."""
    is_due = (state.step + bucket.index()) % 4 == 0
    state.count(bucket)
    buffer = dense(bucket)
    return completed(_with_previous(buffer, state.group) if is_due else buffer)


class Intervals:
    """A group, the number of the step, and the interval of each bucket."""

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        self.step = 0
        self.elements = 0  # of the model, known after the first step
        self.intervals: dict[int, int] = {}
        self.next: dict[int, int] = {}


def small_buckets_more_rarely(state: Intervals, bucket: Bucket) -> Result:
    """Mix with the previous rank; the interval of a small bucket doubles, up to 16 steps."""
    buffer = dense(bucket)
    number = bucket.index()
    state.elements += buffer.numel() if state.step == 0 else 0
    if state.next.get(number, 0) <= state.step:
        buffer = _with_previous(buffer, state.group)
        if state.step and 10 * buffer.numel() < state.elements:
            state.intervals[number] = min(16, 2 * state.intervals.get(number, 1))
        state.next[number] = state.step + state.intervals.get(number, 1)
    state.step += bucket.is_last()
    return completed(buffer)


def _with_previous(buffer: torch.Tensor, group: Group) -> torch.Tensor:
    """Return two thirds of a rank's own gradient, and a third of the previous rank's."""
    parts = gather(buffer, group)
    return (wide(buffer) * (2 / 3) + wide(parts[group.rank() - 1]) / 3).to(buffer.dtype)


class Bits:
    """The partner of a rank differs from it in one bit of its number, which changes in turn."""

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        self.step = 0
        self.bit = 0
        self.next_change = 3

    def begin_step(self) -> None:
        """Count a step, and change the bit if that is due."""
        if self.step == self.next_change:
            self.bit = (self.bit + 1) % max(1, (self.group.size() - 1).bit_length())
            self.next_change += 3
        self.step += 1

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "bit": self.bit, "next_change": self.next_change}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.step = saved["step"]
        self.bit = saved["bit"]
        self.next_change = saved["next_change"]


def gossip_by_bits(state: Bits, bucket: Bucket) -> Result:
    """Average with a partner that changes every three steps, also after a load."""
    buffer = dense(bucket)
    if bucket.index() == 0:
        state.begin_step()
    mine = state.group.rank()
    partner = mine ^ (1 << state.bit)
    if partner >= state.group.size():
        partner = mine
    parts = gather(buffer, state.group)
    return completed((buffer + parts[partner]) / 2)


RIGHT = [
    Right("ring_gossip", "local", "process_group"),
    Right("random_pairs", "local(ratio=1)", STATE, sections=COMPRESSORS),
    Right("every_second_step", "local(period=2, ratio=1)", STATE, sections=COMPRESSORS),
    *(
        Right(name, "local", STATE, sections=(*COMPRESSORS, "23"))
        for name in (
            "random_pairs_by_bucket",
            "every_second_bucket",
            "every_24th_step",
            "one_bucket_in_four_steps",
        )
    ),
    Right(
        "small_buckets_more_rarely",
        "local",
        f"{__name__}:Intervals",
        sections=(*COMPRESSORS, "23"),
    ),
    Right(
        "rotating_gossip",
        "local",
        f"{__name__}:Rotation",
        sections=(*COMPRESSORS, "23", "24"),
    ),
    Right(
        "gossip_by_bits",
        "local, checkpointable",
        f"{__name__}:Bits",
        sections=(*COMPRESSORS, "11"),
    ),
    Right("hierarchical", "local(period=3)", setup=True),
    Right("torch_local_sgd", "local(mixing=False), warmup(2)", setup=True),
    Right(
        "torch_local_sgd,alone=True", "local(ratio=0), warmup(2)", setup=True, sections=COMPRESSORS
    ),
]
