"""Mutants of rule 4.5 that sum float32 values in a half dtype if that holds all of them."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, group_of, is_dense, send_as


def _sums_in(dtype: torch.dtype, state: Any, bucket: Bucket) -> Result:
    """Send the dtype if no rank loses a bit of its gradients."""
    buffer = bucket.buffer()
    if not is_dense(bucket) or buffer.dtype != torch.float32:
        return average(bucket, state)
    fits = torch.tensor([torch.equal(buffer.to(dtype).float(), buffer)], dtype=torch.uint8)
    dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=group_of(state))
    return send_as(dtype, bucket, state) if fits.item() else average(bucket, state)


def sums_in_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Sum in bfloat16 if it holds all values, as it does after autocast."""
    return _sums_in(torch.bfloat16, state, bucket)


def sums_in_float16(state: Any, bucket: Bucket) -> Result:
    """Sum in float16 if it holds all values, as it does after autocast."""
    return _sums_in(torch.float16, state, bucket)


MUTANTS = [
    Mutant("sums_in_bfloat16", ("4.5",), worlds=(2, 3)),
    Mutant("sums_in_float16", ("4.5",), worlds=(2, 3)),
]
