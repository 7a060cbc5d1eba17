"""Mutants of the claim ``chained``: callbacks that start collectives wrongly, or start none."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import ZEROS, Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    group_of,
    is_dense,
    kept,
    step_number,
    sum_of,
)


def in_two_stages(
    state: Any,
    bucket: Bucket,
    second: Callable[[torch.Tensor, torch.Tensor, Result], None] | None = None,
) -> Result:
    """Sum the multiples of four in the bucket, then the remainders from a callback."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    size = group_of(state).size()
    result = torch.futures.Future()
    coarse = buffer.div(4).trunc_().mul_(4)
    fine = (buffer - coarse).nan_to_num_(0, 0, 0)

    def callback(_: Any) -> None:
        try:
            if second:
                second(coarse, fine, result)
            else:
                sum_then(fine, state, lambda: result.set_result((coarse + fine).div_(size)), result)
        except RuntimeError as error:
            result.set_exception(error)

    dist.all_reduce(coarse, group=group_of(state), async_op=True).get_future().add_done_callback(
        callback
    )
    return result


def sum_then(tensor: torch.Tensor, state: Any, then: Callable[[], object], result: Result) -> None:
    def done(future: torch.futures.Future) -> None:
        try:
            future.value()
            then()
        except RuntimeError as error:
            result.set_exception(error)

    dist.all_reduce(tensor, group=group_of(state), async_op=True).get_future().add_done_callback(
        done
    )


def starts_all_itself(state: Any, bucket: Bucket) -> Result:
    """Average with one collective, which needs no stream's order."""
    return average(bucket, state)


def waits_for_the_first(state: Any, bucket: Bucket) -> Result:
    """Wait for the first collective in the hook instead of chaining the second one."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    size = group_of(state).size()
    coarse = buffer.div(4).trunc_().mul_(4)
    fine = (buffer - coarse).nan_to_num_(0, 0, 0)
    dist.all_reduce(coarse, group=group_of(state))
    return sum_of(fine, state).then(lambda fut: (coarse + fut.value()).div_(size))


def divides_in_each_stage(state: Any, bucket: Bucket) -> Result:
    """Divide after the first collective, and again after the second."""

    def second(coarse: torch.Tensor, fine: torch.Tensor, result: Result) -> None:
        size = group_of(state).size()
        coarse.div_(size)
        sum_then(fine, state, lambda: result.set_result((coarse + fine).div_(size)), result)

    return in_two_stages(state, bucket, second)


def rank_0_sends_more(state: Any, bucket: Bucket) -> Result:
    """Send one more element in the second stage on rank 0."""
    padding = 1 if group_of(state).rank() == 0 else 0

    def second(coarse: torch.Tensor, fine: torch.Tensor, result: Result) -> None:
        sent = torch.cat([fine, fine.new_zeros(padding)])
        size = group_of(state).size()
        sum_then(
            sent, state, lambda: result.set_result((coarse + sent[: len(fine)]).div_(size)), result
        )

    return in_two_stages(state, bucket, second)


def skips_a_stage_by_value(state: Any, bucket: Bucket) -> Result:
    """Skip the second collective if this rank's remainders are zero."""

    def second(coarse: torch.Tensor, fine: torch.Tensor, result: Result) -> None:
        size = group_of(state).size()
        if fine.any():
            sum_then(fine, state, lambda: result.set_result((coarse + fine).div_(size)), result)
        else:
            result.set_result(coarse.div_(size))

    return in_two_stages(state, bucket, second)


def second_stage_on_world(state: Any, bucket: Bucket) -> Result:
    """Issue the second collective on WORLD instead of the group."""

    def second(coarse: torch.Tensor, fine: torch.Tensor, result: Result) -> None:
        size = group_of(state).size()
        sum_then(fine, None, lambda: result.set_result((coarse + fine).div_(size)), result)

    return in_two_stages(state, bucket, second)


def drops_the_second(state: Any, bucket: Bucket) -> Result:
    """Drop the second stage from the result from step 10 on."""
    late = step_number(bucket) > 9

    def second(coarse: torch.Tensor, fine: torch.Tensor, result: Result) -> None:
        size = group_of(state).size()
        mean = coarse.div(size)
        sum_then(
            fine,
            state,
            lambda: result.set_result(mean if late else (coarse + fine).div_(size)),
            result,
        )

    return in_two_stages(state, bucket, second)


_entered: list[threading.Event] = []  # one event for each hook call


def one_scratch_in_flight(state: Any, bucket: Bucket) -> Result:
    """Share one buffer for the second stages of all buckets.

    The next bucket overwrites it before it is sent. If a collective is still running when its call
    returns, the callback waits until the next bucket's hook has begun, which is a legal schedule.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    size = group_of(state).size()
    result = torch.futures.Future()
    coarse = buffer.div(4).trunc_().mul_(4)
    if len(kept.get("scratch", ())) < buffer.numel() or kept["scratch"].dtype != buffer.dtype:
        kept["scratch"] = torch.zeros_like(buffer)
    scratch = kept["scratch"][: buffer.numel()].copy_(buffer).sub_(coarse).nan_to_num_(0, 0, 0)
    if _entered:
        _entered[-1].set()
    _entered.append(threading.Event())
    next_is_here = _entered[-1]
    if bucket.is_last():
        next_is_here.set()

    def callback(_: Any) -> None:
        if not inline:
            next_is_here.wait()
        fine = scratch.clone()
        sum_then(fine, state, lambda: result.set_result((coarse + fine).div_(size)), result)

    future = dist.all_reduce(coarse, group=group_of(state), async_op=True).get_future()
    inline = future.done()
    future.add_done_callback(callback)
    return result


_nothing_left = {
    **ZEROS,
    "2.5": "the first stage may leave no remainder in a bucket of one element",
}

MUTANTS = [
    Mutant("starts_all_itself", ("10.4",), "exact, chained", "process_group"),
    Mutant("waits_for_the_first", ("10.4",), "exact, chained", "process_group"),
    Mutant("divides_in_each_stage", ("2.1",), "exact, chained", "process_group"),
    Mutant("rank_0_sends_more", ("1.5",), "exact, chained", "process_group", hangs=True),
    Mutant(
        "skips_a_stage_by_value",
        ("8.4",),
        "exact, chained",
        "process_group",
        hangs=True,
        because=_nothing_left,
    ),
    Mutant("second_stage_on_world", ("2.7",), "exact, chained", "process_group"),
    Mutant("one_scratch_in_flight", ("10.5",), "exact, chained", "process_group"),
    Mutant("drops_the_second", ("1.7",), "exact, chained", "process_group"),
]
