"""Mutants of rules 9.4, 23.5 and 23.9: schedules that are kept at first and left later, and memory
that is kept for half precision alone.
"""

import threading
from collections.abc import Callable
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
    group_of,
    is_dense,
    send_as,
    step_number,
    sum_of,
)

Hook = Callable[[Any, Bucket], Result]

# ---- Partners that meet less and less (23.5)


def doubles_its_period(every: int, most: int) -> Hook:
    """Average in every second step at first, and half as often after each ``every`` steps."""
    next_meeting = 0

    def hook(state: Any, bucket: Bucket) -> Result:
        nonlocal next_meeting
        step = step_number(bucket)
        meets = step >= next_meeting
        if meets and bucket.is_last():
            next_meeting = step + min(most, 2 ** (1 + step // every))
        return average(bucket, state) if meets else completed(bucket.buffer())

    return hook


def averages_rarely_from(first: int, period: int) -> Hook:
    """Average in every fourth step, and from some step on with a period that nobody claimed."""

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        meets = step % 4 == 0 if step < first else step % period == 0
        return average(bucket, state) if meets else completed(bucket.buffer())

    return hook


def pauses_once(first: int, steps: int) -> Hook:
    """Average in every step but for a pause, as while a slow rank catches up."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if first <= step_number(bucket) < first + steps:
            return completed(bucket.buffer())
        return average(bucket, state)

    return hook


class Intervals:
    """A group, and for each bucket the step in which it is mixed next."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.step = 0
        self.elements = 0  # of the model, known after the first step
        self.last: dict[int, int] = {}
        self.next: dict[int, int] = {}


def small_buckets_ever_more_rarely(state: Intervals, bucket: Bucket) -> Result:
    """Mix with the previous rank; the interval of a small bucket doubles with each time."""
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    buffer = bucket.buffer()
    number = bucket.index()
    state.elements += buffer.numel() if state.step == 0 else 0
    if state.next.get(number, 0) <= state.step:
        buffer = _with_previous(buffer, state.process_group)
        is_small = state.step > 0 and 10 * buffer.numel() < state.elements
        interval = 2 * (state.step - state.last.get(number, 0)) if is_small else 1
        state.last[number] = state.step
        state.next[number] = state.step + interval
    state.step += bucket.is_last()
    return completed(buffer)


def one_bucket_pauses(index: int, first: int, steps: int) -> Hook:
    """Average in every step, but for a pause of one bucket."""

    def hook(state: Any, bucket: Bucket) -> Result:
        pauses = first <= step_number(bucket) < first + steps
        if pauses and bucket.index() == index:
            return completed(bucket.buffer())
        return average(bucket, state)

    return hook


def one_bucket_drops_a_rank(index: int, first: int) -> Hook:
    """Average in every step; from some step on, the last rank keeps its gradient of one bucket."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) < first or bucket.index() != index:
            return average(bucket, state)
        group = group_of(state)
        buffer = bucket.buffer()
        is_last = group.rank() == group.size() - 1
        own = buffer.clone()
        if is_last:
            buffer.zero_()
        total = sum_of(buffer, state).wait()
        return completed(own if is_last else total / (group.size() - 1))

    return hook


def _with_previous(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return two thirds of a rank's own gradient, and a third of the previous rank's."""
    parts = [torch.empty_like(buffer) for _ in range(group.size())]
    dist.all_gather(parts, buffer, group=group)
    return buffer * (2 / 3) + parts[group.rank() - 1] * (1 / 3)


# ---- Bytes that grow with the steps (23.9)


def single_precision_from(first: int) -> Hook:
    """Round to float16 in every step, and send the rounded values as float32 from some step on."""

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = bucket.buffer()
        if step_number(bucket) < first or buffer.dtype != torch.float32:
            return send_as(torch.float16, bucket, state)
        size = group_of(state).size()
        return average_of(buffer.div(size).half().float().mul_(size), state)

    return hook


def checks_every(steps: int, first: int) -> Hook:
    """Send half precision, and from some step on the whole bucket again now and then, to compare
    its sum with that of other ranks.
    """

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        sent = send_as(torch.float16, bucket, state)
        if step >= first and step % steps == 0 and is_dense(bucket):
            sum_of(bucket.buffer().clone(), state)
        return sent

    return hook


def sends_once(at: int) -> Hook:
    """Send nothing but the gradients of one step, as for a new estimate of their variance."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) == at and is_dense(bucket):
            sum_of(bucket.buffer().clone(), state)
        return completed(bucket.buffer())

    return hook


def begins_to_send(first: int) -> Hook:
    """Send nothing at first, and later the largest gradient of each bucket, for a log."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) >= first:
            sum_of(bucket.buffer().abs().max().reshape(1), state)
        return completed(bucket.buffer())

    return hook


# ---- Memory for half precision (9.4)


class Wires:
    """Buffers in single precision for sums of half precision."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []
        self.lock = threading.Lock()
        self.masters: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer: one of the pool, if one has the size and the dtype of ``like``."""
        with self.lock:
            for place, wire in enumerate(self.free):
                if wire.numel() == like.numel() and wire.dtype == like.dtype:
                    return self.free.pop(place)
        return torch.empty(like.numel(), dtype=torch.float32)


_WIRES = Wires()
_HALVES = (torch.float16, torch.bfloat16)


def pool_of_another_dtype(state: Any, bucket: Bucket) -> Result:
    """Look in the pool for the dtype of the bucket, and put buffers of float32 into it."""
    buffer = bucket.buffer()
    if buffer.dtype not in _HALVES or not is_dense(bucket):
        return average(bucket, state)
    wire = _WIRES.take(buffer).copy_(buffer)

    def back(future: Result) -> torch.Tensor:
        buffer.copy_(future.value())
        with _WIRES.lock:
            _WIRES.free.append(wire)
        return buffer

    return average_of(wire, state).then(back)


def masters_of_each_step(state: Any, bucket: Bucket) -> Result:
    """Keep a copy of each half-precision bucket in single precision, under the step's number."""
    buffer = bucket.buffer()
    step = step_number(bucket)
    if buffer.dtype in _HALVES and is_dense(bucket):
        _WIRES.masters[step, bucket.index()] = buffer.float()
    return average(bucket, state)


def sums_in_closures(state: Any, bucket: Bucket) -> Result:
    """Sum half precision in single precision, and keep the functions that round the sums."""
    buffer = bucket.buffer()
    if buffer.dtype not in _HALVES or not is_dense(bucket):
        return average(bucket, state)
    wire = buffer.float()

    def back(future: Result) -> torch.Tensor:
        future.value()
        return buffer.copy_(wire)

    _ROUNDINGS.append(back)
    return average_of(wire, state).then(back)


_ROUNDINGS: list[Callable[[Result], torch.Tensor]] = []

_IN_HALF = "rounded(float16, ratio=0.5)"

MUTANTS = [
    Mutant("doubles_its_period,every=97,most=128", ("23.5",), "local", worlds=(2, 3)),
    Mutant("averages_rarely_from,first=389,period=71", ("23.5",), "local", worlds=(2, 3)),
    Mutant("pauses_once,first=641,steps=90", ("23.5",), "local", worlds=(2, 3)),
    Mutant(
        "small_buckets_ever_more_rarely",
        ("23.5",),
        "local",
        f"{__name__}:Intervals",
        worlds=(2, 3),
    ),
    Mutant("one_bucket_pauses,index=1,first=517,steps=83", ("23.5",), "local", worlds=(2, 3)),
    Mutant("one_bucket_drops_a_rank,index=0,first=433", ("23.5",), "local", worlds=(2, 3)),
    Mutant("single_precision_from,first=877", ("23.9",), _IN_HALF),
    Mutant("checks_every,steps=3,first=211", ("23.9",), _IN_HALF),
    Mutant("checks_every,steps=347,first=100", ("23.9",), _IN_HALF),
    Mutant("checks_every,steps=611,first=600", ("23.9",), _IN_HALF),
    Mutant("begins_to_send,first=463", ("23.9",), "local(ratio=0)"),
    Mutant("sends_once,at=733", ("23.9",), "local(ratio=0)"),
    Mutant("pool_of_another_dtype", ("9.4",)),
    Mutant("masters_of_each_step", ("9.4",)),
    Mutant("sums_in_closures", ("9.4",)),
]
