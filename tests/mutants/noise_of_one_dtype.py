"""Mutants of rule 2.4 under ``unbiased(noise=d)``: dtypes that get no noise, or less of it."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, group_of

_NOISE = 0.5


class Drawn:
    """A hook's state with a generator of its own for each rank."""

    def __init__(self, process_group: Any, rank: int) -> None:
        self.group = group_of(process_group)
        self.generator = torch.Generator().manual_seed(7919 * (rank + 1))


def _with_noise(state: Drawn, bucket: Bucket, deviation: float) -> Result:
    """Add noise to this rank's gradients, and average them."""
    buffer = bucket.buffer()
    if buffer.is_sparse or any(parameter.is_complex() for parameter in bucket.parameters()):
        raise TypeError("dense real gradients only")
    noise = torch.randn(buffer.shape, generator=state.generator, dtype=torch.float32)
    buffer.add_(noise.to(buffer.dtype), alpha=deviation)
    return average(bucket, state.group)


def noise_in_float32(state: Drawn, bucket: Bucket) -> Result:
    """Add noise to buckets of float32 alone."""
    is_single = bucket.buffer().dtype is torch.float32
    return _with_noise(state, bucket, _NOISE if is_single else 0.0)


def none_in_float64(state: Drawn, bucket: Bucket) -> Result:
    """Add no noise to buckets of float64."""
    is_double = bucket.buffer().dtype is torch.float64
    return _with_noise(state, bucket, 0.0 if is_double else _NOISE)


def a_third_in_halves(state: Drawn, bucket: Bucket) -> Result:
    """Add a third of the noise to buckets of half precision."""
    is_half = bucket.buffer().element_size() == 2
    return _with_noise(state, bucket, _NOISE / 3 if is_half else _NOISE)


MUTANTS = [
    Mutant(name, ("2.4",), f"unbiased(noise={_NOISE})", f"{__name__}:Drawn")
    for name in ("noise_in_float32", "none_in_float64", "a_third_in_halves")
]
