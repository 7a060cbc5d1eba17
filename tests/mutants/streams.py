"""Mutants of section 21: hooks that race between streams, or are wrong on CUDA devices only.

They are right as long as no operation is late: they give unfinished work some time. They need a
CUDA device; ``tests/test_cuda.py`` judges them.
"""

import itertools
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
    kept,
    step_number,
    sum_of,
)

# About 0.13 s of a GPU's clock: longer than any operation here, and than ranks are apart. The kit's
# delays are longer.
LUCK = 250_000_000
works: list[dist.Work] = []
_meetings = itertools.count()
_streams: dict[str, torch.cuda.Stream] = {}


def beside() -> torch.cuda.Stream:
    """Return the mutant's own stream."""
    if "beside" not in _streams:
        _streams["beside"] = torch.cuda.Stream()
    return _streams["beside"]


def in_step_at_first(state: Any, bucket: Bucket) -> None:
    """Wait for backward and for all ranks in the first step.

    Kernels are loaded in that step, so that ranks are far apart.
    """
    if step_number(bucket) == 0:
        torch.cuda.current_stream().synchronize()
        dist.all_reduce(torch.zeros(1, device=bucket.buffer().device), group=group_of(state))
        torch.cuda.current_stream().synchronize()


def beside_the_peers() -> None:
    """Wait for every rank on the host, not on the device: its time of luck begins now."""
    store = dist.distributed_c10d._get_default_store()
    meeting = next(_meetings)
    store.set(f"beside/{meeting}/{dist.get_rank()}", "")
    store.wait([f"beside/{meeting}/{rank}" for rank in range(dist.get_world_size())])


def waits_at_last(bucket: Bucket) -> None:
    """Give the collectives of a step some time, once: in each of its calls it would add up."""
    beside_the_peers()
    if bucket.is_last():
        torch.cuda._sleep(LUCK)


def reads_before_the_communication_is_done(state: Any, bucket: Bucket) -> Result:
    """Return a completed future of a buffer that the collective has yet to write."""
    in_step_at_first(state, bucket)
    buffer = bucket.buffer().div_(group_of(state).size())
    works.append(dist.all_reduce(buffer, group=group_of(state), async_op=True))
    waits_at_last(bucket)
    return completed(buffer)


def reads_what_was_collected(state: Any, bucket: Bucket) -> Result:
    """Take the value of a collected future, which is complete, but for which no stream waits."""
    in_step_at_first(state, bucket)
    buffer = bucket.buffer().div_(group_of(state).size())
    work = dist.all_reduce(buffer, group=group_of(state), async_op=True)
    result: Result = torch.futures.Future(devices=[buffer.device])

    def read(collected: Any) -> None:
        result.set_result(collected.value()[0].value()[0])

    torch.futures.collect_all([work.get_future()]).add_done_callback(read)
    waits_at_last(bucket)
    return result


def divides_on_a_stream_that_nobody_waits_for(state: Any, bucket: Bucket) -> Result:
    """Divide on a side stream, for which the future does not wait."""

    def divided(future: Any) -> torch.Tensor:
        total = future.value()
        beside().wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside()):
            total.div_(group_of(state).size())
        torch.cuda._sleep(LUCK)
        return total

    return sum_of(bucket.buffer(), state).then(divided)


def sends_before_the_gradients_are_there(state: Any, bucket: Bucket) -> Result:
    """Copy the bucket on a side stream that does not wait for backward's stream."""
    in_step_at_first(state, bucket)
    copy = torch.empty_like(bucket.buffer())
    with torch.cuda.stream(beside()):
        torch.cuda._sleep(LUCK)
        copy.copy_(bucket.buffer())
    torch.cuda.current_stream().wait_stream(beside())
    return average_of(copy, state)


def shares_one_scratch_buffer(state: Any, bucket: Bucket) -> Result:
    """Share one scratch buffer, which an earlier collective may still be reading."""
    in_step_at_first(state, bucket)
    buffer = bucket.buffer()
    size = group_of(state).size()
    key = ("scratch", buffer.dtype)
    if key not in kept:
        kept[key] = torch.empty(1 << 21, dtype=buffer.dtype, device=buffer.device)
    beside_the_peers()
    torch.cuda._sleep(LUCK)
    scratch = kept[key][: buffer.numel()].copy_(buffer)
    return sum_of(scratch, state).then(lambda future: future.value() / size)


def gives_back_what_another_stream_reads(state: Any, bucket: Bucket) -> Result:
    """Free memory that a side stream still reads.

    The allocator then gives it to backward's stream.
    """
    share = bucket.buffer() / group_of(state).size()
    beside().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside()):
        copy = share.clone()
    del share
    with torch.cuda.stream(beside()):
        return sum_of(copy, state)


def looks_at_values_on_the_host(state: Any, bucket: Bucket) -> Result:
    """Wait on the host for a check whether the gradients are finite."""
    bool(bucket.buffer().isfinite().all())
    return average(bucket, state)


def draws_from_the_default_generator(state: Any, bucket: Bucket) -> Result:
    """Draw from dropout's default generator."""
    buffer = bucket.buffer()
    if buffer.layout == torch.strided and buffer.numel():
        torch.rand(1, device=buffer.device)
    return average(bucket, state)


def takes_more_in_every_step(state: Any, bucket: Bucket) -> Result:
    """Allocate scratch memory of a new size in every step, which cannot be reused."""
    step = step_number(bucket)
    if bucket.is_last() and bucket.buffer().is_cuda:
        torch.empty((step + 1) << 22, device=bucket.buffer().device)
    return average(bucket, state)


def does_nothing_when_captured(state: Any, bucket: Bucket) -> Result:
    """Return the local gradient during the capture of a graph."""
    if torch.cuda.is_current_stream_capturing():
        return completed(bucket.buffer())
    return average(bucket, state)


MUTANTS = [
    Mutant("reads_before_the_communication_is_done", ("21.1",), device="cuda"),
    Mutant("reads_what_was_collected", ("21.1",), device="cuda"),
    Mutant("divides_on_a_stream_that_nobody_waits_for", ("21.1",), device="cuda"),
    Mutant("sends_before_the_gradients_are_there", ("21.1",), device="cuda"),
    Mutant("shares_one_scratch_buffer", ("21.1",), device="cuda"),
    Mutant("gives_back_what_another_stream_reads", ("21.1",), device="cuda"),
    Mutant("looks_at_values_on_the_host", ("21.2",), device="cuda"),
    Mutant("draws_from_the_default_generator", ("21.3",), device="cuda"),
    Mutant("takes_more_in_every_step", ("21.4",), device="cuda"),
    Mutant("does_nothing_when_captured", ("21.5",), device="cuda"),
]
