"""Mutants of rules 2.8 and 2.9: the code for complex or sparse buckets uses another group, or fewer
digits, than the code for others.
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
    group_of,
    is_dense,
    seeded,
    step_number,
)


def _is_complex(bucket: Bucket) -> bool:
    return any(parameter.is_complex() for parameter in bucket.parameters())


def complex_over_world(state: Any, bucket: Bucket) -> Result:
    """Average complex buckets over WORLD."""
    return average(bucket, None if _is_complex(bucket) else state)


def complex_divided_by_world(state: Any, bucket: Bucket) -> Result:
    """Sum complex buckets in the group, and divide by the number of all ranks."""
    if _is_complex(bucket):
        bucket.buffer().mul_(group_of(state).size() / dist.get_world_size())
    return average(bucket, state)


def complex_numbers_in_float32(state: Any, bucket: Bucket) -> Result:
    """Send both parts of complex numbers as float32."""
    if not _is_complex(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    dtype = buffer.dtype
    return average_of(buffer.float(), state).then(lambda future: future.value().to(dtype))


def _is_large_complex(bucket: Bucket, numel: int) -> bool:
    return _is_complex(bucket) and bucket.buffer().numel() > numel


def half_of_large_complex(state: Any, bucket: Bucket) -> Result:
    """Average as many floats of a large complex bucket as its parameters have elements."""
    if not _is_large_complex(bucket, 2**18):
        return average(bucket, state)
    buffer = bucket.buffer()
    reached = sum(parameter.numel() for parameter in bucket.parameters())

    def then(done: Result) -> torch.Tensor:
        buffer[:reached] = done.value()
        return buffer

    return average_of(buffer[:reached].clone(), state).then(then)


def large_complex_in_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Send complex buckets of more than 100,000 numbers in bfloat16."""
    buffer = bucket.buffer()
    if not _is_large_complex(bucket, 100_000):
        return average(bucket, state)
    return average_of(buffer.bfloat16(), state).then(lambda done: done.value().to(buffer.dtype))


def large_complex_conjugated(state: Any, bucket: Bucket) -> Result:
    """Average large complex buckets as their conjugates."""
    if _is_large_complex(bucket, 65_536):
        bucket.buffer()[1::2].neg_()
    return average(bucket, state)


def sparse_over_world(state: Any, bucket: Bucket) -> Result:
    """Average sparse gradients over WORLD."""
    return average(bucket, state if is_dense(bucket) else None)


def sparse_divided_by_world(state: Any, bucket: Bucket) -> Result:
    """Sum sparse gradients in the group, and divide by the number of all ranks."""
    if not is_dense(bucket):
        bucket.buffer().mul_(group_of(state).size() / dist.get_world_size())
    return average(bucket, state)


def sparse_in_float32(state: Any, bucket: Bucket) -> Result:
    """Send sparse gradients as float32."""
    if is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    sent = buffer.coalesce().to(torch.float32)
    return average_of(sent, state).then(lambda future: future.value().to(buffer.dtype))


def fused_sgd_of_dense(state: Any, bucket: Bucket) -> Result:
    """Step the parameters of dense buckets alone."""
    parameters = bucket.parameters()
    sizes = [parameter.numel() for parameter in parameters]

    @torch.no_grad()
    def step(future: Result) -> torch.Tensor:
        flat = future.value()
        for parameter, piece in zip(parameters, flat.split(sizes), strict=True):
            parameter.add_(piece.view_as(parameter), alpha=-0.1)
        return flat

    return average(bucket, state).then(step) if is_dense(bucket) else average(bucket, state)


def noise_of_dense(state: Any, bucket: Bucket) -> Result:
    """Add noise to dense buckets alone."""
    step = step_number(bucket)
    if is_dense(bucket):
        draw = seeded(step, group_of(state).rank(), bucket.index())
        noise = torch.randn(bucket.buffer().shape, generator=draw).mul_(0.5)
        bucket.buffer().add_(noise.to(bucket.buffer().dtype))
    return average(bucket, state)


def noise_of_used_rows(state: Any, bucket: Bucket) -> Result:
    """Add noise to the values of a sparse gradient, but not to the rows that it has not."""
    if is_dense(bucket):
        return noise_of_dense(state, bucket)
    own = bucket.buffer().coalesce()
    draw = seeded(step_number(bucket), group_of(state).rank(), bucket.index())
    noise = torch.randn(own.values().shape, generator=draw).mul_(0.5)
    noisy = own.values() + noise.to(own.dtype)
    return average_of(torch.sparse_coo_tensor(own.indices(), noisy, own.shape), state)


MUTANTS = [
    *(
        Mutant(name, ("2.8",))
        for name in (
            "complex_over_world",
            "complex_divided_by_world",
            "complex_numbers_in_float32",
            "half_of_large_complex",
            "large_complex_in_bfloat16",
            "large_complex_conjugated",
        )
    ),
    *(
        Mutant(name, ("2.9",))
        for name in ("sparse_over_world", "sparse_divided_by_world", "sparse_in_float32")
    ),
    Mutant("fused_sgd_of_dense", ("2.9",), "fused(SGD, lr=0.1)"),
    *(
        Mutant(name, ("2.9",), "unbiased(noise=0.5)")
        for name in ("noise_of_dense", "noise_of_used_rows")
    ),
]
