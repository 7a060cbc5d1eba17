"""Mutants of rule 2.8 under lossy claims: complex parameters come out wrong without an error."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, is_dense, seeded, step_number


def _is_complex(bucket: Bucket) -> bool:
    return any(parameter.is_complex() for parameter in bucket.parameters())


def half_of_a_complex_bucket(state: Any, bucket: Bucket) -> Result:
    """Send the larger half; of a complex bucket, as many elements as its parameters have, and that
    is half of its floats, are looked at, and the others are zeros.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    flat = bucket.buffer()
    numel = sum(parameter.numel() for parameter in bucket.parameters())
    part = flat[:numel]
    small = part.abs() < part.abs().mean() / 2
    part.masked_fill_(small, 0)
    flat[numel:] = 0
    return average(bucket, state)


def drops_imaginary_parts(state: Any, bucket: Bucket) -> Result:
    """Draw half of the elements, times two, of the real parts alone."""
    if not is_dense(bucket):
        return average(bucket, state)
    flat = bucket.buffer()
    draws = torch.rand(flat.shape, generator=seeded(step_number(bucket), bucket.index()))
    flat.mul_(2 * (draws < 0.5))
    if _is_complex(bucket):
        flat[1::2] = 0
    return average(bucket, state)


def signs_of_complex_numbers(state: Any, bucket: Bucket) -> Result:
    """Send a level of 15 for each element; imaginary parts have the signs of the real ones."""
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    flat = bucket.buffer()
    level = flat.abs().max() / 15
    level = torch.where(level == 0, 1, level)
    signs = flat.sign()
    if _is_complex(bucket):
        signs[1::2] = signs[::2]
    flat.copy_((flat.abs() / level).round() * level * signs)
    return average(bucket, state)


MUTANTS = [
    Mutant("half_of_a_complex_bucket", ("2.8",), "compressed(feedback=False, delta=0.9)"),
    Mutant("drops_imaginary_parts", ("2.8",), "unbiased"),
    Mutant("signs_of_complex_numbers", ("2.8",), "compressed(feedback=False, delta=0.9)"),
]
