"""Mutants of section 12: hooks that return a local gradient as the mean after a failure."""

import contextlib
import logging
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, group_of

# 12.1 An error of its own collective


def goes_on_local(state: Any, bucket: Bucket) -> Result:
    """Return the local gradient if the collective cannot be issued."""
    local = bucket.buffer().clone()
    try:
        return average(bucket, state)
    except RuntimeError:
        return completed(local)


def logs_and_goes_on(state: Any, bucket: Bucket) -> Result:
    """Log a warning and return zeros if the collective cannot be issued."""
    try:
        return average(bucket, state)
    except RuntimeError as error:
        logging.getLogger(__name__).warning("allreduce failed: %s", error)
        return completed(torch.zeros_like(bucket.buffer()))


# 12.2 A dead peer, 12.3 a timeout


def _collective(bucket: Bucket, state: Any) -> torch.futures.Future:
    buffer = bucket.buffer().div_(group_of(state).size())
    return dist.all_reduce(buffer, group=group_of(state), async_op=True).get_future()


def never_reads_value(state: Any, bucket: Bucket) -> Result:
    """Return the buffer from the callback without reading fut.value()."""
    return _collective(bucket, state).then(lambda fut: bucket.buffer())


def catches_in_callback(state: Any, bucket: Bucket) -> Result:
    """Catch every RuntimeError of the collective in the callback."""

    def result(fut: torch.futures.Future) -> torch.Tensor:
        try:
            return fut.value()[0]
        except RuntimeError:
            return bucket.buffer()

    return _collective(bucket, state).then(result)


def suppresses_in_wait(state: Any, bucket: Bucket) -> Result:
    """Wait for the collective, and suppress its errors."""
    future = _collective(bucket, state)
    with contextlib.suppress(RuntimeError):
        future.wait()
    return completed(bucket.buffer())


def _forgive(bucket: Bucket, state: Any, words: str, forgiven: bool) -> Result:
    """Return the local gradient after some errors, and raise the others.

    An error is forgiven if the presence of ``words`` in its text equals ``forgiven``.
    """

    def result(fut: torch.futures.Future) -> torch.Tensor:
        try:
            return fut.value()[0]
        except RuntimeError as error:
            if (words in str(error)) is not forgiven:
                raise
            return bucket.buffer()

    return _collective(bucket, state).then(result)


def forgives_dead_peer(state: Any, bucket: Bucket) -> Result:
    """Return the local gradient if a peer has closed its connection."""
    return _forgive(bucket, state, "Timed out", forgiven=False)


def forgives_timeout(state: Any, bucket: Bucket) -> Result:
    """Return the local gradient if a peer is late."""
    return _forgive(bucket, state, "Timed out", forgiven=True)


# 12.4 The last of several collectives


def _first_stage(bucket: Bucket, state: Any) -> torch.Tensor:
    """Average, wait, and return the mean for the second stage: right."""
    size = group_of(state).size()
    buffer = bucket.buffer()
    dist.all_reduce(buffer.div_(size), group=group_of(state))
    return buffer


def never_reads_second_value(state: Any, bucket: Bucket) -> Result:
    """Broadcast the mean from rank 0, and never read the broadcast's result."""
    buffer = _first_stage(bucket, state)
    return (
        dist.broadcast(
            buffer,
            group=group_of(state),
            src=dist.get_global_rank(group_of(state), 0),
            async_op=True,
        )
        .get_future()
        .then(lambda fut: buffer)
    )


def suppresses_in_last_wait(state: Any, bucket: Bucket) -> Result:
    """Suppress the errors of a barrier after the mean."""
    buffer = _first_stage(bucket, state)
    with contextlib.suppress(RuntimeError):
        dist.barrier(group=group_of(state))
    return completed(buffer)


def gathers_what_is_there(state: Any, bucket: Bucket) -> Result:
    """Gather the mean from all ranks, and return this rank's own if that fails."""
    buffer = _first_stage(bucket, state)
    size = group_of(state).size()
    parts = [torch.empty_like(buffer) for _ in range(size)]

    def result(fut: torch.futures.Future) -> torch.Tensor:
        try:
            fut.value()
        except RuntimeError:
            return buffer
        return parts[0]

    return (
        dist.all_gather(parts, buffer, group=group_of(state), async_op=True)
        .get_future()
        .then(result)
    )


_both = {"12.3": "a timeout is a failed collective like any other"}

MUTANTS = [
    Mutant("goes_on_local", ("12.1",)),
    Mutant("logs_and_goes_on", ("12.1",)),
    Mutant("never_reads_value", ("12.2", "12.3"), because=_both),
    Mutant("catches_in_callback", ("12.2", "12.3"), because=_both),
    Mutant("suppresses_in_wait", ("12.2", "12.3"), because=_both),
    Mutant("forgives_dead_peer", ("12.2",)),
    Mutant("forgives_timeout", ("12.3",)),
    *(
        Mutant(name, ("12.4",))
        for name in ("never_reads_second_value", "suppresses_in_last_wait", "gathers_what_is_there")
    ),
]
