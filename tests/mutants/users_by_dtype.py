"""Mutants of rule 4.1 that take the mean over the ranks that used a parameter, in some dtypes."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, is_dense, pieces_of, sum_of


def _over_users(state: Any, bucket: Bucket) -> Result:
    """Divide the sum of each parameter by the number of ranks with a gradient that is not zero."""
    pieces = pieces_of(bucket)
    used = torch.tensor([float(bool(piece.any())) for piece in pieces], dtype=torch.float64)
    wire = torch.cat([bucket.buffer().double(), used])

    def divide(done: Result) -> torch.Tensor:
        total, users = done.value()[: -len(pieces)], done.value()[-len(pieces) :]
        for piece, part, count in zip(pieces, pieces_of(bucket, total), users, strict=True):
            piece.copy_(part / count.clamp(min=1))
        return bucket.buffer()

    return sum_of(wire, state).then(divide)


def users_of_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Average bfloat16 over the ranks that used a parameter."""
    is_half = is_dense(bucket) and bucket.buffer().dtype == torch.bfloat16
    return _over_users(state, bucket) if is_half else average(bucket, state)


def users_of_float64(state: Any, bucket: Bucket) -> Result:
    """Average float64 over the ranks that used a parameter, unless it may be a complex one."""
    if not is_dense(bucket) or any(parameter.is_complex() for parameter in bucket.parameters()):
        return average(bucket, state)
    is_double = bucket.buffer().dtype == torch.float64
    return _over_users(state, bucket) if is_double else average(bucket, state)


MUTANTS = [
    Mutant("users_of_bfloat16", ("4.1",)),
    Mutant("users_of_float64", ("4.1",)),
]
