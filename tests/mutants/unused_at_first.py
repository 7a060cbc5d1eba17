"""Mutants of rule 23.1 that decide in their first steps which gradients are sent."""

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
)

_FIRST_STEPS = 8
_steps: dict[torch.nn.Parameter, int] = {}
_masks: dict[torch.nn.Parameter, torch.Tensor] = {}


def _watched(state: Any, bucket: Bucket) -> bool:
    """Note which elements of new parameters are used by some rank; return whether any is new."""
    is_new = False
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if _steps.get(parameter, 0) < _FIRST_STEPS:
            is_new = True
            _steps[parameter] = _steps.get(parameter, 0) + 1
            used = (gradient != 0).to(torch.uint8).contiguous()
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group_of(state))
            _masks[parameter] = used.bool() | _masks.get(parameter, used.bool())
    return is_new


def leaves_out_unused(state: Any, bucket: Bucket) -> Result:
    """Send a bucket no more if no rank has used its parameters in the first eight steps."""
    if not is_dense(bucket) or bucket.buffer().is_complex():
        return average(bucket, state)
    if _watched(state, bucket) or any(bool(_masks[one].any()) for one in bucket.parameters()):
        return average(bucket, state)
    return completed(bucket.buffer())


def sends_what_was_used(state: Any, bucket: Bucket) -> Result:
    """Send only the elements that were not zero on some rank in the first eight steps."""
    if not is_dense(bucket) or bucket.buffer().is_complex():
        return average(bucket, state)
    if not _watched(state, bucket):
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.mul_(_masks[parameter])
    return average_of(bucket.buffer(), state)


MUTANTS = [
    Mutant("leaves_out_unused", ("23.1",)),
    Mutant("sends_what_was_used", ("23.1",)),
]
