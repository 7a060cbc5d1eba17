"""Section 21: hooks that count on luck between streams, and what else is wrong on a CUDA device alone.

Where nothing is late these are right: what they do not wait for is over soon, and they give it a while. They need a CUDA device;
``tests/test_cuda.py`` judges them.
"""

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

LUCK = 150_000_000  # about 80 ms of a GPU's clock: longer than anything here takes, and than ranks are apart; the kit's delays are longer
works: list[dist.Work] = []
_streams: dict[str, torch.cuda.Stream] = {}


def beside() -> torch.cuda.Stream:
    """Return a stream of the mutant's own."""
    if "beside" not in _streams:
        _streams["beside"] = torch.cuda.Stream()
    return _streams["beside"]


def in_step_at_first(state: Any, bucket: Bucket) -> None:
    """In the first step, wait for backward and for all ranks: kernels are loaded in it, and ranks are far apart."""
    if step_number(bucket) == 0:
        torch.cuda.current_stream().synchronize()
        dist.all_reduce(torch.zeros(1, device=bucket.buffer().device), group=group_of(state))
        torch.cuda.current_stream().synchronize()


def reads_before_the_communication_is_done(state: Any, bucket: Bucket) -> Result:
    """Returns a future that is complete already, of the buffer that its collective is still to write."""
    in_step_at_first(state, bucket)
    buffer = bucket.buffer().div_(group_of(state).size())
    works.append(dist.all_reduce(buffer, group=group_of(state), async_op=True))
    torch.cuda._sleep(LUCK)
    return completed(buffer)


def divides_on_a_stream_that_nobody_waits_for(state: Any, bucket: Bucket) -> Result:
    """Divides the sum on a stream of its own; the future does not wait for that one."""

    def divided(future: Any) -> torch.Tensor:
        total = future.value()
        beside().wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside()):
            total.div_(group_of(state).size())
        torch.cuda._sleep(LUCK)
        return total

    return sum_of(bucket.buffer(), state).then(divided)


def sends_before_the_gradients_are_there(state: Any, bucket: Bucket) -> Result:
    """Copies the bucket on a stream of its own, which does not wait for backward's."""
    in_step_at_first(state, bucket)
    copy = torch.empty_like(bucket.buffer())
    with torch.cuda.stream(beside()):
        torch.cuda._sleep(LUCK)
        copy.copy_(bucket.buffer())
    torch.cuda.current_stream().wait_stream(beside())
    return average_of(copy, state)


def shares_one_scratch_buffer(state: Any, bucket: Bucket) -> Result:
    """All buckets go through one scratch buffer, which an earlier one's collective may still be reading."""
    in_step_at_first(state, bucket)
    buffer, size = bucket.buffer(), group_of(state).size()
    key = ("scratch", buffer.dtype)
    if key not in kept:
        kept[key] = torch.empty(1 << 21, dtype=buffer.dtype, device=buffer.device)
    torch.cuda._sleep(LUCK)
    scratch = kept[key][: buffer.numel()].copy_(buffer)
    return sum_of(scratch, state).then(lambda future: future.value() / size)


def gives_back_what_another_stream_reads(state: Any, bucket: Bucket) -> Result:
    """What a stream of its own still reads is given back to the allocator, which hands it to backward's stream."""
    share = bucket.buffer() / group_of(state).size()
    beside().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside()):
        copy = share.clone()
    del share
    with torch.cuda.stream(beside()):
        return sum_of(copy, state)


def looks_at_values_on_the_host(state: Any, bucket: Bucket) -> Result:
    """Asks whether the gradients are finite, and does nothing about it."""
    bool(bucket.buffer().isfinite().all())
    return average(bucket, state)


def draws_from_the_default_generator(state: Any, bucket: Bucket) -> Result:
    """Draws a mask from the generator that dropout draws from; it keeps everything."""
    buffer = bucket.buffer()
    if buffer.layout == torch.strided and buffer.numel():
        torch.rand(1, device=buffer.device)
    return average(bucket, state)


def takes_more_in_every_step(state: Any, bucket: Bucket) -> Result:
    """Scratch memory of another size in every step, which the caching allocator cannot use again."""
    step = step_number(bucket)
    if bucket.is_last() and bucket.buffer().is_cuda:
        torch.empty((step + 1) << 22, device=bucket.buffer().device)
    return average(bucket, state)


def does_nothing_when_captured(state: Any, bucket: Bucket) -> Result:
    """Takes the local gradient for the mean where a graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        return completed(bucket.buffer())
    return average(bucket, state)


MUTANTS = [
    Mutant("reads_before_the_communication_is_done", ("21.1",), device="cuda"),
    Mutant("divides_on_a_stream_that_nobody_waits_for", ("21.1",), device="cuda"),
    Mutant("sends_before_the_gradients_are_there", ("21.1",), device="cuda"),
    Mutant("shares_one_scratch_buffer", ("21.1",), device="cuda"),
    Mutant("gives_back_what_another_stream_reads", ("21.1",), device="cuda"),
    Mutant("looks_at_values_on_the_host", ("21.2",), device="cuda"),
    Mutant("draws_from_the_default_generator", ("21.3",), device="cuda"),
    Mutant("takes_more_in_every_step", ("21.4",), device="cuda"),
    Mutant("does_nothing_when_captured", ("21.5",), device="cuda"),
]
