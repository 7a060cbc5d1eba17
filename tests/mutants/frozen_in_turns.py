"""Mutants of 4.1: hooks that go wrong once parameters of a bucket require no gradient.

DDP keeps them in its buckets if they were frozen after it was made.
"""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    completed,
    group_of,
    is_dense,
    sum_of,
)


def divides_what_is_trained(state: Any, bucket: Bucket) -> Result:
    """Divide the parts of trained parameters, at offsets that leave out the frozen ones."""
    size = group_of(state).size()
    numels = [one.numel() for one in bucket.parameters() if one.requires_grad]

    def divide(fut: Any) -> torch.Tensor:
        total = fut.value()
        if not is_dense(bucket):
            return total / size
        begin = 0
        for numel in numels:
            total[begin : begin + numel] /= size
            begin += numel
        return total

    return sum_of(bucket.buffer(), state).then(divide)


def leaves_out_frozen_buckets(state: Any, bucket: Bucket) -> Result:
    """Take a bucket for frozen if one of its parameters is."""
    if all(parameter.requires_grad for parameter in bucket.parameters()):
        return average(bucket, state)
    return completed(bucket.buffer())


MUTANTS = [
    Mutant("divides_what_is_trained", ("4.1",)),
    Mutant("leaves_out_frozen_buckets", ("4.1",)),
]
