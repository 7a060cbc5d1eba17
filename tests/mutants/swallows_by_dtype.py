"""Mutants of section 12: the path of one dtype hides the failure of its collective."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, group_of, is_dense


def waits_in_vain_for_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Sum bfloat16 in float32; if the wait fails, log nothing and go on."""
    buffer = bucket.buffer()
    group = group_of(state)
    if buffer.dtype != torch.bfloat16 or not is_dense(bucket):
        return average(bucket, state)
    wide = buffer.float().div_(group.size())
    work = dist.all_reduce(wide, group=group, async_op=True)
    with contextlib.suppress(RuntimeError):
        work.wait()
    return completed(buffer.copy_(wide))


def complex_on_its_own(state: Any, bucket: Bucket) -> Result:
    """Average complex parameters, which DDP hands over as pairs, and never read the result."""
    buffer = bucket.buffer()
    group = group_of(state)
    if not bucket.parameters()[0].is_complex():
        return average(bucket, state)
    future = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True).get_future()
    return future.then(lambda fut: buffer)


def piece_by_piece_in_float64(state: Any, bucket: Bucket) -> Result:
    """Reduce the gradients of several float64 parameters one by one; those that fail stay local."""
    group = group_of(state)
    gradients = bucket.gradients()
    if bucket.buffer().dtype != torch.float64 or len(gradients) < 2:
        return average(bucket, state)
    for gradient in gradients:
        gradient.div_(group.size())
        try:
            dist.all_reduce(gradient, group=group)
        except RuntimeError:
            continue
    return completed(bucket.buffer())


MUTANTS = [
    Mutant("waits_in_vain_for_bfloat16", ("12.5",)),
    Mutant("complex_on_its_own", ("12.5",)),
    Mutant("piece_by_piece_in_float64", ("12.5",)),
]
