"""Hooks whose first steps are exact, and hooks that serve two models in one backward."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.right import COMPRESSORS, Right
from tests.right._common import Bucket, Group, Result, State, completed, dense, gather, wide

Callback = Callable[[torch.futures.Future], torch.Tensor]


class Warm(State):
    """A state with a number of exact steps.

    Args:
        process_group: the group to average over.
        exact: the number of exact steps.
    """

    def __init__(self, process_group: Group, exact: int = 2) -> None:
        super().__init__(process_group)
        self.exact = exact

    def is_exact(self, bucket: Bucket) -> bool:
        is_exact = self.step < self.exact
        self.count(bucket)
        return is_exact


class WarmByOptimizer(Warm):
    """A state whose exact steps are the first ones of the trainer's optimizer."""

    def __init__(self, process_group: Group, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(process_group)
        self.optimizer_steps = 0
        optimizer.register_step_post_hook(self.count_step)

    def count_step(self, *_: object) -> None:
        self.optimizer_steps += 1

    def is_exact(self, bucket: Bucket) -> bool:
        return self.optimizer_steps < self.exact


def by_shards(state: Warm, bucket: Bucket) -> Result:
    """Average by shards of a padded buffer in the first steps, which are multiplied by 1 / size;
    then round to int8 with feedback.
    """
    buffer = dense(bucket)
    total = state.residuals.of(bucket) + buffer
    size = state.group.size()
    if state.is_exact(bucket):
        padded = torch.nn.functional.pad(buffer, (0, -buffer.numel() % size))
        shard = padded.new_empty(padded.numel() // size)
        dist.reduce_scatter_tensor(shard, padded, group=state.group)
        parts = gather(shard.mul_(1 / size), state.group)
        return completed(torch.cat(parts)[: buffer.numel()])
    largest = total.abs().max() if total.numel() else total.new_zeros(())
    scale = torch.where(largest == 0, 1, largest / 127).view(1)
    levels = gather((total / scale).round_().to(torch.int8), state.group)
    scales = gather(scale, state.group)
    decoded = [level.to(total.dtype) * of for level, of in zip(levels, scales, strict=True)]
    state.residuals.keep(bucket, total - decoded[state.group.rank()])
    return completed(torch.stack(decoded).mean(0).to(buffer.dtype))


def in_callbacks(state: Warm, bucket: Bucket) -> Result:
    """Send the largest half of the elements; a callback divides, and keeps the rest.

    In the first steps nothing is left out, and the callback of the same function divides.
    """
    return _send_largest(state, bucket, everything=state.is_exact(bucket))


def _send_largest(state: Warm, bucket: Bucket, everything: bool = False) -> Result:
    buffer = dense(bucket)
    total = state.residuals.of(bucket) + buffer
    sent = total.clone()
    if not everything:
        smallest = total.abs().topk(total.numel() // 2, largest=False).indices
        sent[smallest] = 0
    left = total - sent
    work = dist.all_reduce(sent, group=state.group, async_op=True)
    return work.get_future().then(_finish(state, bucket, left, buffer.dtype))


def _finish(state: Warm, bucket: Bucket, left: torch.Tensor, dtype: torch.dtype) -> Callback:
    def finish(done: torch.futures.Future) -> torch.Tensor:
        state.residuals.keep(bucket, left)
        return done.value()[0].div_(state.group.size()).to(dtype)

    return finish


class InHalf(Warm):
    """A state whose exact steps send half precision.

    Args:
        process_group: the group to average over.
        dtype: the name of the dtype that they send.
    """

    def __init__(self, process_group: Group, dtype: str) -> None:
        super().__init__(process_group)
        self.dtype = getattr(torch, dtype)


def begins_in_half(state: InHalf, bucket: Bucket) -> Result:
    """Send half precision in the first steps, and then the larger half of the elements."""
    if not state.is_exact(bucket):
        return _send_largest(state, bucket)
    buffer = dense(bucket)
    # Complex numbers are sent as they are.
    sent = buffer.clone() if buffer.is_complex() else buffer.to(state.dtype, copy=True)
    work = dist.all_reduce(sent.div_(state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].to(buffer.dtype))


def sums_in_double(state: Warm, bucket: Bucket) -> Result:
    """Sum all ranks' gradients in float64 in the first step, in the order of ranks; later send the
    larger half with feedback.
    """
    buffer = dense(bucket)
    if state.is_exact(bucket):
        mean = torch.zeros_like(buffer, dtype=torch.float64)
        for one in gather(buffer, state.group):
            mean += one.double() if not one.is_complex() else one
        return completed((mean / state.group.size()).to(buffer.dtype))
    total = wide(state.residuals.of(bucket) + buffer)
    smallest = total.abs().topk(total.numel() // 2, largest=False).indices
    sent = total.index_fill(0, smallest, 0).to(buffer.dtype)
    state.residuals.keep(bucket, total.to(buffer.dtype) - sent)
    return completed(
        torch.stack([wide(one) for one in gather(sent, state.group)]).mean(0).to(buffer.dtype)
    )


_TWO = f"{__name__}:Warm"
_ONE = f"{__name__}:Warm,exact=1"
_NONE = f"{__name__}:Warm,exact=0"
_IN_BFLOAT16 = f"{__name__}:InHalf,dtype=bfloat16"
_IN_FLOAT16 = f"{__name__}:InHalf,dtype=float16"

RIGHT = [
    Right("by_shards", "compressed(delta=0.9), warmup(2)", _TWO, sections=COMPRESSORS),
    Right("in_callbacks", "compressed(delta=0.5), warmup(2)", _TWO),
    Right(
        "in_callbacks",
        "compressed(delta=0.5), warmup(2)",
        f"{__name__}:WarmByOptimizer",
        sections=COMPRESSORS,
    ),
    Right("in_callbacks", "compressed(delta=0.5)", _NONE, sections=("11", "13")),
    Right("begins_in_half", "compressed(delta=0.5), warmup(2, rounded=bfloat16)", _IN_BFLOAT16),
    Right(
        "begins_in_half",
        "compressed(delta=0.5), warmup(2, rounded=float16)",
        _IN_FLOAT16,
        sections=COMPRESSORS,
    ),
    Right("sums_in_double", "compressed(delta=0.5), warmup(1)", _ONE, sections=COMPRESSORS),
]
