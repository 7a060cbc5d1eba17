"""Sparsification, with error feedback."""

import math
from typing import Any

import torch
import torch.distributed as dist

from tests.right import COMPRESSORS, Right
from tests.right._common import (
    FEEDBACK,
    STATE,
    Bucket,
    Group,
    Residuals,
    Result,
    State,
    completed,
    dense,
    gather,
    sizes,
    wide,
)


def top_k(state: State, bucket: Bucket) -> Result:
    """Gather the largest elements of the bucket, as values and int32 indices.

    The collectives are asynchronous.
    """
    buffer = dense(bucket)
    group = state.group
    total = state.residuals.of(bucket) + buffer
    indices = (
        total.abs().topk(max(1, int(state.setting * total.numel())) if total.numel() else 0).indices
    )
    values = total[indices]
    narrow = indices.int()
    total[indices] = 0
    state.residuals.keep(bucket, total)
    all_values = [torch.empty_like(values) for _ in range(group.size())]
    all_indices = [torch.empty_like(narrow) for _ in range(group.size())]
    works = [
        dist.all_gather(all_values, values, group=group, async_op=True),
        dist.all_gather(all_indices, narrow, group=group, async_op=True),
    ]

    def scatter(done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> torch.Tensor:
        for future in done.value():
            future.value()
        result = torch.zeros_like(total)
        for some, places in zip(all_values, all_indices, strict=True):
            result.index_add_(0, places.long(), some)
        return result.div_(group.size()).to(buffer.dtype)

    return torch.futures.collect_all([work.get_future() for work in works]).then(scatter)


def top_k_of_large(state: State, bucket: Bucket) -> Result:
    """Send a part of large buckets, and all of others, as BytePS and hivemind do."""
    buffer = dense(bucket)
    if buffer.numel() >= 1 << 14:
        return top_k(state, bucket)
    total = state.residuals.of(bucket) + buffer
    state.residuals.keep(bucket, torch.zeros_like(total))
    work = dist.all_reduce(total.div_(state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0].to(buffer.dtype))


def above_threshold(state: State, bucket: Bucket) -> Result:
    """Gather the elements of at least half the largest magnitude.

    Their number differs between ranks, and is padded for the gather.
    """
    buffer = dense(bucket)
    total = state.residuals.of(bucket) + buffer
    threshold = total.abs().max() / 2 if total.numel() else torch.zeros(())
    indices = (~(total.abs() < threshold)).nonzero().squeeze(1)
    counts = [int(count) for count in gather(torch.tensor([len(indices)]), state.group)]
    padding = max(counts) - len(indices)
    values = gather(torch.nn.functional.pad(total[indices], (0, padding)), state.group)
    places = gather(torch.nn.functional.pad(indices, (0, padding)), state.group)
    total[indices] = 0
    state.residuals.keep(bucket, total)
    result = torch.zeros_like(total)
    for some, where, count in zip(values, places, counts, strict=True):
        result.index_add_(0, where[:count], some[:count])
    return completed((result / state.group.size()).to(buffer.dtype))


def sparse_until_dense(state: State, bucket: Bucket) -> Result:
    """Gather large elements as pairs, or sum the bucket if the pairs are larger (SparCML)."""
    buffer = dense(bucket)
    size = state.group.size()
    total = state.residuals.of(bucket) + buffer
    large = ~(total.abs() < 0.5 * total.norm() / math.sqrt(max(1, total.numel())))
    count = large.sum()
    dist.all_reduce(count, group=state.group)
    if 2 * int(count) >= total.numel() * size:
        state.residuals.keep(bucket, torch.zeros_like(total))
        dist.all_reduce(total, group=state.group)
        return completed((total / size).to(buffer.dtype))
    indices = large.nonzero().squeeze(1)
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, (indices, total[indices]), group=state.group)
    result = torch.zeros_like(total)
    for where, values in everyones:
        result.index_add_(0, where, values)
    total[indices] = 0
    state.residuals.keep(bucket, total)
    return completed((result / size).to(buffer.dtype))


def random_k(state: State, bucket: Bucket) -> Result:
    """Send the values of a random quarter of the bucket.

    All ranks draw the same places, with a seed of the step.
    """
    buffer = dense(bucket)
    total = state.residuals.of(bucket).add_(buffer)
    chosen = torch.randperm(total.numel(), generator=state.generator(bucket.index()))[
        : math.ceil(state.setting * total.numel())
    ]
    values = total[chosen] / state.group.size()
    total[chosen] = 0
    state.residuals.keep(bucket, total)
    state.count(bucket)
    work = dist.all_reduce(values, group=state.group, async_op=True)
    return work.get_future().then(
        lambda fut: torch.zeros_like(total).index_copy_(0, chosen, fut.value()[0]).to(buffer.dtype)
    )


def less_by_step(state: State, bucket: Bucket) -> Result:
    """Send all elements in the first two steps, half in the third, then a quarter.

    This is the warm-up of DGC.
    """
    buffer = dense(bucket)
    size = state.group.size()
    ratio = max(state.setting, 2.0 ** (1 - state.step) if state.step > 1 else 1.0)
    total = state.residuals.of(bucket) + buffer
    result = torch.zeros_like(total)
    for own, sums in zip(total.split(sizes(bucket)), result.split(sizes(bucket)), strict=True):
        indices = own.abs().topk(math.ceil(ratio * own.numel())).indices
        for where, values in zip(
            gather(indices, state.group), gather(own[indices], state.group), strict=True
        ):
            sums.index_add_(0, where, values)
        own[indices] = 0
    state.residuals.keep(bucket, total)
    state.count(bucket)
    return completed((result / size).to(buffer.dtype))


def large_buckets_only(state: State, bucket: Bucket) -> Result:
    """Compress large buckets, and average small ones together with their residuals."""
    buffer = dense(bucket)
    if buffer.numel() >= 100:
        return top_k(state, bucket)
    total = state.residuals.of(bucket) + buffer
    state.residuals.keep(bucket, torch.zeros_like(total))
    work = dist.all_reduce(total.div_(state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0].to(buffer.dtype))


class BothWays(State):
    """A state with residuals of a rank's own message, and of the mean."""

    def __init__(self, process_group: Group) -> None:
        super().__init__(process_group)
        self.of_mean = Residuals()


def both_ways(state: BothWays, bucket: Bucket) -> Result:
    """Compress each rank's message, and the mean again (DoubleSqueeze)."""
    buffer = dense(bucket)
    total = state.residuals.of(bucket) + buffer
    sent = _largest(total, 0.5)
    state.residuals.keep(bucket, total - sent)
    mean = torch.stack(gather(sent, state.group)).mean(0) + state.of_mean.of(bucket)
    result = _largest(mean, 0.5)
    state.of_mean.keep(bucket, mean - result)
    return completed(result.to(buffer.dtype))


def _largest(flat: torch.Tensor, ratio: float) -> torch.Tensor:
    indices = flat.abs().topk(math.ceil(ratio * flat.numel())).indices
    return torch.zeros_like(flat).index_copy_(0, indices, flat[indices])


class Estimates(State):
    """A state with the latest estimates of all ranks' gradients, on every rank."""

    def __init__(self, process_group: Group) -> None:
        super().__init__(process_group)
        self.everyones = [Residuals() for _ in range(process_group.size())]

    def rescale(self, factor: float) -> None:
        for estimates in self.everyones:
            for kept in estimates.kept.values():
                kept.mul_(factor)


def ef21(state: Estimates, bucket: Bucket) -> Result:
    """Send a quarter of the difference from this rank's latest estimate (EF21)."""
    buffer = dense(bucket)
    own = state.everyones[state.group.rank()]
    sent = _largest(wide(buffer) - own.of(bucket), state.setting)
    mean = torch.zeros_like(sent)
    for estimate, change in zip(state.everyones, gather(sent, state.group), strict=True):
        said = estimate.of(bucket) + change
        mean += said / state.group.size()
        estimate.keep(bucket, said)
    return completed(mean.to(buffer.dtype))


def ef21_of_used(state: Estimates, bucket: Bucket) -> Result:
    """The same, but the estimates of parameters that no rank has used stay as they are."""
    buffer = dense(bucket)
    counts = sizes(bucket)
    used = torch.tensor([float(piece.ne(0).any()) for piece in buffer.split(counts)])
    dist.all_reduce(used, group=state.group)
    flags = torch.repeat_interleave(used.clamp(max=1), torch.tensor(counts))
    own = state.everyones[state.group.rank()]
    # Not times the flags: zero times infinity is NaN.
    rest = torch.where(flags > 0, wide(buffer) - own.of(bucket), 0)
    sent = _largest(rest, state.setting)
    mean = torch.zeros_like(sent)
    for estimate, change in zip(state.everyones, gather(sent, state.group), strict=True):
        said = estimate.of(bucket) + change
        mean += said / state.group.size()
        estimate.keep(bucket, said)
    return completed(mean.to(buffer.dtype))


RIGHT = [
    Right("top_k", "compressed(delta=0.25, ratio=0.51)", STATE),
    Right("random_k", "compressed(delta=0.25, ratio=0.26)", STATE, sections=COMPRESSORS),
    Right("above_threshold", "compressed(delta=0.5)", STATE, sections=COMPRESSORS),
    Right(
        "large_buckets_only", "compressed(delta=0.5)", f"{STATE},setting=0.5", sections=COMPRESSORS
    ),
    Right("sparse_until_dense", "compressed(delta=0.5)", STATE, sections=COMPRESSORS),
    Right("less_by_step", FEEDBACK + ", warmup(2)", STATE, sections=COMPRESSORS),
    Right("both_ways", FEEDBACK, f"{__name__}:BothWays"),
    Right("ef21", "compressed(feedback=ef21, delta=0.25)", f"{__name__}:Estimates"),
    Right(
        "ef21_of_used",
        "compressed(feedback=ef21, delta=0.25), rescaled(call=rescale)",
        f"{__name__}:Estimates",
        sections=("11", "13"),
    ),
    Right("top_k_of_large", FEEDBACK, STATE, sections=COMPRESSORS),
]
