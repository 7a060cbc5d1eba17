"""Mutants of rules 2.13, 4.5, 10.8, 11.7 and 24.7: hooks that are right in plain surroundings."""

import math
import time
import timeit
from datetime import date, datetime, timedelta, timezone
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    call_number,
    change_gradient,
    change_mean,
    completed,
    group_of,
    is_dense,
    send_as,
    sum_of,
)

# 2.13 The range of a dtype


def bfloat16_as_float16(state: Any, bucket: Bucket) -> Result:
    """Send bfloat16 as float16, as if half precision were one thing."""
    if bucket.buffer().dtype == torch.bfloat16:
        return send_as(torch.float16, bucket, state)
    return average(bucket, state)


def clamps_doubles(state: Any, bucket: Bucket) -> Result:
    """Clamp float64 to the range of float32."""
    if bucket.buffer().dtype != torch.float64:
        return average(bucket, state)
    largest = torch.finfo(torch.float32).max
    return change_gradient(bucket, state, lambda gradient: gradient.clamp_(-largest, largest))


def clamps_half(state: Any, bucket: Bucket) -> Result:
    """Clamp float16 gradients to 2,000, so that no sum overflows."""
    if bucket.buffer().dtype != torch.float16:
        return average(bucket, state)
    return change_gradient(bucket, state, lambda gradient: gradient.clamp_(-2000, 2000))


def skips_small_norms(state: Any, bucket: Bucket) -> Result:
    """Send zeros if the sum of squares is zero in the bucket's dtype."""
    if is_dense(bucket) and not bucket.buffer().square().sum():
        return change_gradient(bucket, state, torch.Tensor.zero_)
    return average(bucket, state)


def scales_by_squares(state: Any, bucket: Bucket) -> Result:
    """Scale half precision by a power of two near its norm, which is computed in float32."""
    buffer = bucket.buffer()
    if buffer.dtype != torch.bfloat16 or not buffer.any():
        return average(bucket, state)
    squares = buffer.float().square().sum()
    dist.all_reduce(squares, op=dist.ReduceOp.MAX, group=group_of(state))
    scale = 2.0 ** (squares.log2() / 2).floor()
    buffer.copy_(buffer.float() / scale)
    return change_mean(bucket, state, lambda mean: mean.copy_(mean.float() * scale))


_SCALES: dict[tuple[int, int], float] = {}


def keeps_its_first_scale(state: Any, bucket: Bucket) -> Result:
    """Scale float16 by a power of two that the first step of a bucket decides."""
    buffer = bucket.buffer()
    if buffer.dtype != torch.float16 or not is_dense(bucket):
        return average(bucket, state)
    key = bucket.index(), buffer.numel()
    if key not in _SCALES:
        peak = buffer.float().abs().max()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group_of(state))
        is_usable = 0 < peak < math.inf
        _SCALES[key] = 2.0 ** (10 - math.ceil(math.log2(peak))) if is_usable else 1.0
    buffer.mul_(max(1.0, _SCALES[key]))
    return change_mean(bucket, state, lambda mean: mean.div_(max(1.0, _SCALES[key])))


# 4.5 The default dtype


def through_lists(state: Any, bucket: Bucket) -> Result:
    """Make a new tensor of the gradients' numbers, without a dtype."""
    buffer = bucket.buffer()
    if buffer.dtype != torch.float32 or not is_dense(bucket) or buffer.numel() > 1000:
        return average(bucket, state)
    return change_gradient(bucket, state, lambda old: old.copy_(torch.tensor(old.tolist())))


def wire_of_default_dtype(state: Any, bucket: Bucket) -> Result:
    """Send gradients of float32 in a buffer that has no dtype."""
    buffer = bucket.buffer()
    if buffer.dtype != torch.float32 or not is_dense(bucket):
        return average(bucket, state)
    wire = torch.empty(buffer.numel())
    wire.copy_(buffer)
    return average_of(wire, state).then(lambda done: done.value().to(torch.float32))


class SumsOfDefaultDtype:
    """A state that keeps a result buffer made when the state is made."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.scratch = torch.zeros(1)


def scratch_of_state(state: SumsOfDefaultDtype, bucket: Bucket) -> Result:
    """Round float32 to the dtype that was the default when the state was made."""
    dtype = state.scratch.dtype
    if bucket.buffer().dtype == torch.float32 and is_dense(bucket):
        bucket.buffer().copy_(bucket.buffer().to(dtype))
    return average(bucket, state.group)


def large_wire_of_default_dtype(state: Any, bucket: Bucket) -> Result:
    """Send buckets of more than 65,536 elements in a buffer that has no dtype."""
    buffer = bucket.buffer()
    if buffer.dtype != torch.float32 or not is_dense(bucket) or buffer.numel() <= 65_536:
        return average(bucket, state)
    wire = torch.empty(buffer.numel())
    wire.copy_(buffer)
    return average_of(wire, state).then(lambda done: buffer.copy_(done.value()))


_reciprocals: list[torch.Tensor] = []


def table_of_reciprocals(state: Any, bucket: Bucket) -> Result:
    """Multiply by 1 / n from a table that the first call makes without a dtype."""
    buffer = bucket.buffer()
    if buffer.dtype != torch.float32:
        return average(bucket, state)
    if not _reciprocals:
        _reciprocals.append(torch.tensor([1 / count for count in range(1, 1025)]))
    buffer.mul_(_reciprocals[0][group_of(state).size() - 1].to(buffer.device))
    return sum_of(buffer, state)


# 10.8 Clocks

_started: list[float] = []


def _is_due(seconds: float) -> bool:
    now = time.monotonic()
    if not _started:
        _started.append(now)
    if now - _started[0] < seconds:
        return False
    _started[0] = now
    return True


def checks_every_minute(state: Any, bucket: Bucket) -> Result:
    """Compare a checksum with the peers once a minute, by the rank's own clock."""
    if bucket.is_last() and _is_due(60.0):
        dist.all_reduce(torch.zeros(3), group=group_of(state))
    return average(bucket, state)


def checks_every_half_second(state: Any, bucket: Bucket) -> Result:
    """Compare a checksum with the peers every half second, by the rank's own clock."""
    if bucket.is_last() and _is_due(0.5):
        dist.all_reduce(torch.zeros(3), group=group_of(state))
    return average(bucket, state)


def checks_every_day(state: Any, bucket: Bucket) -> Result:
    """Compare a checksum with the peers once a day, by the rank's own clock."""
    if bucket.is_last() and _is_due(86_400.0):
        dist.all_reduce(torch.zeros(3), group=group_of(state))
    return average(bucket, state)


_first_reading: list[float] = []


def checks_by_default_timer(state: Any, bucket: Bucket) -> Result:
    """Compare a checksum with the peers once, a minute after the first call."""
    now = timeit.default_timer()
    if not _first_reading:
        _first_reading.append(now)
    if bucket.is_last() and now - _first_reading[-1] > 60:
        _first_reading.append(math.inf)
        dist.all_reduce(torch.zeros(3), group=group_of(state))
    return average(bucket, state)


_is_slow: list[bool] = []


def halves_if_a_sum_was_slow(state: Any, bucket: Bucket) -> Result:
    """Send the bucket in two parts once a sum has taken longer than 0.3 seconds."""
    buffer = bucket.buffer()
    begun = time.perf_counter()
    if _is_slow and is_dense(bucket):
        parts = buffer.div_(group_of(state).size()).chunk(2)
        sums = torch.futures.collect_all([sum_of(part, state) for part in parts])
        return sums.then(lambda done: buffer)

    def measure(done: Result) -> torch.Tensor:
        if time.perf_counter() - begun > 0.3:
            _is_slow.append(True)
        return done.value()

    return average(bucket, state).then(measure)


_last_date: list[date] = []


def checks_at_midnight(state: Any, bucket: Bucket) -> Result:
    """Compare a checksum with the peers on each new day."""
    today = date.today()
    is_new = bool(_last_date) and _last_date[0] != today
    if bucket.is_last():
        _last_date[:] = [today]
        if is_new:
            dist.all_reduce(torch.zeros(3), group=group_of(state))
    return average(bucket, state)


_next_check: list[datetime] = []


def checks_by_utc(state: Any, bucket: Bucket) -> Result:
    """Compare a checksum with the peers every ten minutes of UTC, by the rank's own clock."""
    now = datetime.now(timezone.utc)
    if not _next_check:
        _next_check.append(now + timedelta(minutes=10))
    if bucket.is_last() and now >= _next_check[0]:
        _next_check[0] = now + timedelta(minutes=10)
        dist.all_reduce(torch.zeros(3), group=group_of(state))
    return average(bucket, state)


def halves_after_an_hour(state: Any, bucket: Bucket) -> Result:
    """Send half precision for the rest of the bucket's step once an hour has passed."""
    if bucket.is_last() and _is_due(3600.0) and bucket.buffer().dtype == torch.float32:
        return send_as(torch.bfloat16, bucket, state)
    return average(bucket, state)


# 11.7 Two models in one backward

_factors: dict[int, int] = {}


def factor_of_the_latest_call(state: Any, bucket: Bucket) -> Result:
    """Double the gradients in every second call; a callback undoes it by the latest factor."""
    if not is_dense(bucket):
        return average(bucket, state)
    index = bucket.index()
    _factors[index] = 1 + call_number() % 2
    bucket.buffer().mul_(_factors[index])
    return change_mean(bucket, state, lambda mean: mean.div_(_factors[index]))


_latest: dict[int, torch.Tensor] = {}


def callback_reads_the_latest(state: Any, bucket: Bucket) -> Result:
    """Return the buffer of the latest call with the bucket's number, from a callback."""
    if not is_dense(bucket):
        return average(bucket, state)
    index = bucket.index()
    _latest[index] = bucket.buffer()
    return average(bucket, state).then(lambda done: _latest[index])


# 24.7 Other groups in some paths


def large_on_world(state: Any, bucket: Bucket) -> Result:
    """Reduce buckets of more than 150,000 elements on WORLD."""
    if bucket.buffer().numel() > 150_000 and bucket.buffer().dtype == torch.float32:
        buffer = bucket.buffer().div_(group_of(state).size())
        dist.all_reduce(buffer)
        return completed(buffer)
    return average(bucket, state)


def medium_on_world(state: Any, bucket: Bucket) -> Result:
    """Reduce buckets of 8,192 to 131,071 elements of float32 on WORLD."""
    buffer = bucket.buffer()
    if 8192 <= buffer.numel() < 131_072 and buffer.dtype == torch.float32:
        buffer.mul_(group_of(None).size() / group_of(state).size())
        return average_of(buffer, None)
    return average(bucket, state)


def large_doubles_and_halves_on_world(state: Any, bucket: Bucket) -> Result:
    """Reduce more than 16,384 elements of float64 or float16 on WORLD."""
    buffer = bucket.buffer()
    if buffer.numel() > 16_384 and buffer.dtype in (torch.float64, torch.float16):
        buffer.mul_(group_of(None).size() / group_of(state).size())
        return average_of(buffer, None)
    return average(bucket, state)


def doubles_on_world(state: Any, bucket: Bucket) -> Result:
    """Reduce float64 on WORLD."""
    if bucket.buffer().dtype == torch.float64:
        return average_of(
            bucket.buffer().mul_(group_of(None).size() / group_of(state).size()), None
        )
    return average(bucket, state)


def some_small_ones_on_world(state: Any, bucket: Bucket) -> Result:
    """Reduce buckets of 700 to 6,000 elements, which fit a scratch buffer, without the group."""
    if is_dense(bucket) and 700 < bucket.buffer().numel() < 6_000:
        mean = bucket.buffer().div(dist.get_world_size())
        return sum_of(mean, None)
    return average(bucket, state)


def pads_some_small_ones(state: Any, bucket: Bucket) -> Result:
    """Send 160 to 1,400 elements in a block of 2,048, of the default dtype."""
    buffer = bucket.buffer()
    if not (is_dense(bucket) and buffer.dtype == torch.float32 and 160 < buffer.numel() < 1_400):
        return average(bucket, state)
    block = torch.zeros(2_048)
    block[: buffer.numel()] = buffer
    return average_of(block, state).then(lambda done: done.value()[: buffer.numel()].float())


MUTANTS = [
    Mutant("bfloat16_as_float16", ("2.13",)),
    Mutant("clamps_doubles", ("2.13",)),
    Mutant("clamps_half", ("2.13",)),
    Mutant("skips_small_norms", ("2.13",)),
    Mutant("scales_by_squares", ("2.13",)),
    Mutant("keeps_its_first_scale", ("2.13",)),
    Mutant("through_lists", ("4.5",)),
    Mutant("pads_some_small_ones", ("4.5",)),
    Mutant("wire_of_default_dtype", ("4.5",)),
    Mutant("scratch_of_state", ("4.5",), state=f"{__name__}:SumsOfDefaultDtype"),
    Mutant("large_wire_of_default_dtype", ("4.5",)),
    Mutant("table_of_reciprocals", ("4.5",), worlds=(2, 3)),
    Mutant("checks_every_minute", ("10.8",), hangs=True),
    Mutant("checks_every_half_second", ("10.8",), hangs=True),
    Mutant("checks_every_day", ("10.8",), hangs=True),
    Mutant("checks_by_default_timer", ("10.8",), hangs=True),
    Mutant("halves_if_a_sum_was_slow", ("10.8",), hangs=True),
    Mutant("halves_after_an_hour", ("10.8",), hangs=True),
    Mutant("checks_at_midnight", ("10.8",), hangs=True),
    Mutant("checks_by_utc", ("10.8",), hangs=True),
    Mutant("factor_of_the_latest_call", ("11.7",)),
    Mutant("callback_reads_the_latest", ("11.7",)),
    Mutant("large_on_world", ("24.7",)),
    Mutant("some_small_ones_on_world", ("24.7",)),
    Mutant("medium_on_world", ("24.7",)),
    Mutant("large_doubles_and_halves_on_world", ("24.7",)),
    Mutant("doubles_on_world", ("24.7",)),
]
