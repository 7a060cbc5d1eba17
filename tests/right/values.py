"""Hooks that are right in shapes of their own: noise for privacy, experts, and lists of places."""

import torch
import torch.distributed as dist

from tests.right import ARITHMETIC, COMPRESSORS, Right
from tests.right._common import (
    STATE,
    Bucket,
    Group,
    Result,
    State,
    completed,
    dense,
    gather,
    sizes,
)
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


def noise_of_first_rank(state: State, bucket: Bucket) -> Result:
    """Add noise on the first rank alone, as Opacus does: it is drawn once for the sum."""
    buffer = dense(bucket)
    if state.group.rank() == 0:
        noise = state.setting * torch.randn(buffer.shape, generator=state.generator(bucket.index()))
        buffer.add_(noise.to(buffer.dtype))
    state.count(bucket)
    work = dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
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


def list_of_places(group: Group, bucket: Bucket) -> Result:
    """Send places and values of a gradient that is zero but for a twentieth or less."""
    return _listed(dense(bucket), group, 20)


def list_of_places_in_half(group: Group, bucket: Bucket) -> Result:
    """Send places, and values in float16, of a gradient that is zero but for an eighth or less."""
    return _listed(dense(bucket), group, 8, torch.float16)


def _listed(
    buffer: torch.Tensor, group: Group, parts: int, wire: torch.dtype | None = None
) -> Result:
    """Return the mean of lists of places and values, or that of whole buffers.

    Args:
        buffer: the gradients.
        group: the group.
        parts: a rank may list as many elements as one of so many parts of the buffer has.
        wire: the dtype in which values of float32 and float64 are sent; None for their own.
    """
    size = group.size()
    is_wide = buffer.dtype in (torch.float32, torch.float64)
    narrow = wire if wire and is_wide else buffer.dtype
    places = buffer.nonzero().squeeze(1)
    most = torch.tensor([len(places)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    if buffer.is_complex() or int(most) * parts > buffer.numel():
        sent = (buffer / size).to(narrow)
        work = dist.all_reduce(sent, group=group, async_op=True)
        return work.get_future().then(lambda fut: fut.value()[0].to(buffer.dtype))
    if not int(most):
        return completed(buffer)
    missing = int(most) - len(places)
    values = torch.cat([buffer[places].to(narrow), buffer.new_zeros(missing, dtype=narrow)])
    all_places = gather(torch.cat([places, places.new_zeros(missing)]), group)
    total = torch.zeros_like(buffer, dtype=torch.float64)
    for at, part in zip(all_places, gather(values, group), strict=True):
        total.index_add_(0, at, part.double())
    return completed((total / size).to(buffer.dtype))


def marked_elements(group: Group, bucket: Bucket) -> Result:
    """Send the elements that are not zero on some rank, if these are at most a quarter."""
    buffer = dense(bucket)
    marks = (buffer != 0).to(torch.uint8)
    dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=group)
    places = marks.nonzero().squeeze(1)
    if buffer.is_complex() or 4 * len(places) > len(buffer):
        work = dist.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(lambda fut: fut.value()[0].div_(group.size()))

    def spread(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return torch.zeros_like(buffer).index_copy_(0, places, done.value()[0].div_(group.size()))

    return dist.all_reduce(buffer[places], group=group, async_op=True).get_future().then(spread)


def sends_narrow_values(group: Group, bucket: Bucket) -> Result:
    """Gather in bfloat16 if it holds all values, and sum in the bucket's dtype."""
    buffer = dense(bucket)
    fits = torch.zeros(1, dtype=torch.uint8)
    if buffer.dtype == torch.float32:
        fits[0] = torch.equal(buffer.bfloat16().float(), buffer)
    dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=group)
    sent = buffer.bfloat16() if fits.item() else buffer
    total = torch.stack(gather(sent, group)).to(buffer.dtype).sum(0)
    return completed(total / group.size())


def rows_of_embeddings(group: Group, bucket: Bucket) -> Result:
    """Send the rows of an embedding that are not zero on some rank, if these are a quarter or
    less."""
    buffer = dense(bucket)
    tables = [one for one in bucket.gradients() if one.dim() == 2 and len(one) >= 16]
    if len(tables) != 1 or len(bucket.gradients()) != 1 or buffer.is_complex():
        work = dist.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(lambda fut: fut.value()[0].div_(group.size()))
    table = tables[0]
    used = (table != 0).any(1).to(torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    rows = used.nonzero().squeeze(1)
    if 4 * len(rows) > len(table):
        rows = torch.arange(len(table))
    part = table[rows]

    def put_back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        table[rows] = done.value()[0].div_(group.size())
        return buffer

    return dist.all_reduce(part, group=group, async_op=True).get_future().then(put_back)


RIGHT = [
    Right("list_of_places", state="process_group"),
    Right("list_of_places_in_half", "rounded(float16)", "process_group", sections=ARITHMETIC),
    Right("rows_of_embeddings", state="process_group", sections=("2", "3", "8", "12")),
    Right("marked_elements", state="process_group", sections=("2", "3", "8", "12")),
    Right("sends_narrow_values", state="process_group", sections=("2", "4", "8", "12")),
    Right("gaussian_noise", "unbiased(noise=0.25)", STATE),
    Right("noise_of_first_rank", "unbiased(noise=0.25, ranks=1)", STATE),
    Right("experts", "compressed(delta=0.25)", STATE, sections=(*COMPRESSORS, "4", "8")),
]
