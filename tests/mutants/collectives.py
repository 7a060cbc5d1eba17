"""Section 10 of the rule book: hooks that are right, and keep backward waiting."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, group_of


def waits_for_work(state: Any, bucket: Bucket) -> Result:
    """Waits for its allreduce before it returns."""
    buffer = bucket.buffer().div_(group_of(state).size())
    dist.all_reduce(buffer, group=group_of(state))
    return completed(buffer)


def waits_for_future(state: Any, bucket: Bucket) -> Result:
    """Waits for the future that it returns."""
    future = average(bucket, state)
    future.wait()
    return future


def waits_in_last_bucket(state: Any, bucket: Bucket) -> Result:
    """Waits in the last bucket of a step, for the largest element of all ranks, that it logs."""
    if bucket.is_last():
        dist.all_reduce(torch.ones(()), op=dist.ReduceOp.MAX, group=group_of(state))
    return average(bucket, state)


MUTANTS = [Mutant(name, ("10.1",)) for name in ("waits_for_work", "waits_for_future", "waits_in_last_bucket")]
