"""Quantization to few bits, with error feedback and without."""

from typing import Any

import torch
import torch.distributed as dist

from tests.right import COMPRESSORS, Right
from tests.right._common import (
    FEEDBACK,
    STATE,
    Bucket,
    Group,
    Result,
    State,
    completed,
    dense,
    gather,
    wide,
)


def ef_sign(state: State, bucket: Bucket) -> Result:
    """Send eight signs per byte, and one scale per bucket (Karimireddy et al.)."""
    buffer = dense(bucket)
    total = state.residuals.of(bucket) + buffer
    scale = total.abs().sum().view(1) / max(1, total.numel())
    bits = torch.nn.functional.pad(total >= 0, (0, -total.numel() % 8)).view(-1, 8)
    packed = (bits << torch.arange(8)).sum(1).to(torch.uint8)

    def unpack(some: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        signs = (
            (some.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8))
            .bitwise_and(1)
            .view(-1)[: total.numel()]
        )
        return (signs * 2.0 - 1).to(total.dtype) * of

    state.residuals.keep(bucket, total - unpack(packed, scale))
    everyones = zip(gather(packed, state.group), gather(scale, state.group), strict=True)
    return completed(torch.stack([unpack(*one) for one in everyones]).mean(0).to(buffer.dtype))


class StateOfScaler(State):
    """A state that follows a GradScaler."""

    def rescale(self, factor: float) -> None:
        """Take the residuals to the units of a new loss scale."""
        for residual in self.residuals.kept.values():
            residual.mul_(factor)


def one_bit(state: State, bucket: Bucket) -> Result:
    """Send one bit per element, and two means per block of 64 elements (Seide et al.).

    One mean is of the positive elements, the other of the rest.
    """
    buffer = dense(bucket)
    total = state.residuals.of(bucket) + buffer
    blocks = torch.nn.functional.pad(total, (0, -total.numel() % 64)).view(-1, 64)
    inside = (torch.arange(blocks.numel()) < total.numel()).view(-1, 64)
    above = (blocks > 0) & inside
    below = inside & ~above
    levels = torch.stack(
        [torch.where(side, blocks, 0).sum(1) / side.sum(1).clamp(min=1) for side in (below, above)]
    )
    both = zip(gather(above, state.group), gather(levels, state.group), strict=True)
    decoded = [
        torch.where(up, of[1].unsqueeze(1), of[0].unsqueeze(1)).view(-1)[: total.numel()]
        for up, of in both
    ]
    state.residuals.keep(bucket, total - decoded[state.group.rank()])
    return completed(torch.stack(decoded).mean(0).to(buffer.dtype))


def int8(state: State, bucket: Bucket) -> Result:
    """Quantize to eight bits of the bucket's largest element, with feedback."""
    buffer = dense(bucket)
    total = state.residuals.of(bucket) + buffer
    largest = total.abs().max() if total.numel() else torch.zeros((), dtype=total.dtype)
    scale = torch.where(largest == 0, 1, largest / 127).view(1)
    levels = gather((total / scale).round_().to(torch.int8), state.group)
    scales = gather(scale, state.group)
    decoded = [level.to(total.dtype) * of for level, of in zip(levels, scales, strict=True)]
    state.residuals.keep(bucket, total - decoded[state.group.rank()])
    return completed((sum(decoded[1:], decoded[0]) / len(decoded)).to(buffer.dtype))


def _fp8(total: torch.Tensor, group: Group, scale: torch.Tensor) -> list[torch.Tensor]:
    """Return the decoded e4m3 messages of all ranks; the values are scaled by ``scale``."""
    sent = gather((total * scale).to(torch.float8_e4m3fn).view(torch.uint8), group)
    return [
        one.view(torch.float8_e4m3fn).to(total.dtype) / of
        for one, of in zip(sent, gather(scale, group), strict=True)
    ]


def _fp8_scale(total: torch.Tensor) -> torch.Tensor:
    largest = total.abs().max() if total.numel() else torch.ones((), dtype=total.dtype)
    # A residual may become so small that the quotient overflows.
    return (448 / largest.clamp(min=1e-30)).view(1)


def fp8(group: Group, bucket: Bucket) -> Result:
    """Round to e4m3, scaled to the bucket's largest element, without feedback."""
    total = wide(dense(bucket))
    return completed(
        torch.stack(_fp8(total, group, _fp8_scale(total))).mean(0).to(bucket.buffer().dtype)
    )


def fp8_feedback(state: State, bucket: Bucket) -> Result:
    """Round to e4m3 with feedback."""
    total = state.residuals.of(bucket) + dense(bucket)
    decoded = _fp8(total, state.group, _fp8_scale(total))
    state.residuals.keep(bucket, total - decoded[state.group.rank()])
    return completed(torch.stack(decoded).mean(0).to(bucket.buffer().dtype))


def after_warm_up(state: State, bucket: Bucket, encode: Any) -> Result:
    """Average in the first two steps, then compress by ``encode`` with feedback."""
    buffer = dense(bucket)
    total = state.residuals.of(bucket) + bucket.buffer()
    warm = state.step < 2
    state.count(bucket)
    if warm:
        work = dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
        return work.get_future().then(lambda fut: fut.value()[0])
    decoded = encode(total, state.group)
    state.residuals.keep(bucket, total - decoded[state.group.rank()])
    return completed(torch.stack(decoded).mean(0).to(buffer.dtype))


def fp8_by_powers_of_two(state: State, bucket: Bucket) -> Result:
    """Round to e4m3 with a power of two as scale, after two exact steps."""
    return after_warm_up(
        state,
        bucket,
        lambda total, group: _fp8(
            total, group, torch.exp2(torch.floor(torch.log2(_fp8_scale(total))))
        ),
    )


def bfloat16_feedback(state: State, bucket: Bucket) -> Result:
    """Round to bfloat16 with feedback, after two exact steps."""
    return after_warm_up(
        state,
        bucket,
        lambda total, group: [one.to(total.dtype) for one in gather(total.bfloat16(), group)],
    )


RIGHT = [
    Right("int8", "compressed(delta=0.9, ratio=0.27)", STATE, sections=COMPRESSORS),
    Right("fp8_feedback", "compressed(delta=0.9, ratio=0.27)", STATE, sections=COMPRESSORS),
    Right("one_bit", FEEDBACK, STATE),
    Right("ef_sign", "compressed(delta=0.15, ratio=0.04)", STATE, sections=COMPRESSORS),
    Right(
        "ef_sign",
        "compressed(delta=0.15, ratio=0.04), rescaled(call=rescale)",
        f"{__name__}:StateOfScaler",
        sections=("11",),
    ),
    Right(
        "fp8",
        "compressed(feedback=False, delta=0.99, ratio=0.27)",
        "process_group",
        sections=COMPRESSORS,
    ),
    Right("fp8_by_powers_of_two", "compressed(delta=0.99), warmup(2)", STATE, sections=COMPRESSORS),
    Right("bfloat16_feedback", "compressed(delta=0.99), warmup(2)", STATE, sections=COMPRESSORS),
]
