"""Lossy hooks that are right in shapes of their own: noise for privacy, and experts."""

import torch
import torch.distributed as dist

from tests.right import COMPRESSORS, Right
from tests.right._common import STATE, Bucket, Result, State, completed, dense, gather, sizes
from tests.right.sparse import _largest


def gaussian_noise(state: State, bucket: Bucket) -> Result:
    """Add noise to every element, as for differential privacy: zeros do not stay zeros."""
    buffer = dense(bucket)
    generator = state.generator(state.group.rank(), bucket.index())
    noise = state.setting * torch.randn(buffer.shape, generator=generator)
    state.count(bucket)
    sent = (buffer + noise.to(buffer.dtype)) / state.group.size()
    work = dist.all_reduce(sent, group=state.group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def experts(state: State, bucket: Bucket) -> Result:
    """Send nothing of a parameter whose gradient is zero on all ranks, and keep its residual.

    DDP drops the result of an expert that no rank has used.
    """
    buffer = dense(bucket)
    parts = buffer.split(sizes(bucket))
    used = torch.tensor([bool((part != 0).any()) for part in parts], dtype=torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=state.group)
    total = state.residuals.of(bucket)
    sent = torch.zeros_like(total)
    for part, rest, out, is_used in zip(
        parts, total.split(sizes(bucket)), sent.split(sizes(bucket)), used, strict=True
    ):
        if is_used:
            rest.add_(part)
            out.copy_(_largest(rest, state.setting))
            rest.sub_(out)
    state.residuals.keep(bucket, total)
    mean = torch.stack(gather(sent, state.group)).mean(0)
    return completed(mean.to(buffer.dtype))


RIGHT = [
    Right("gaussian_noise", "unbiased(noise=0.25)", STATE),
    Right("experts", "compressed(delta=0.25)", STATE, sections=(*COMPRESSORS, "4", "8")),
]
