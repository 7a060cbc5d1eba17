"""Send eight bits per element: its place between the least and the largest value of its row.

A row is the whole bucket, or ``bucket_size`` consecutive elements of the bucket, the last row
padded with zeros. With ``x`` a row of rank ``r``, ``lo = min(x, 0)``, ``hi = max(x, 0)``:

    scale   s_r = max((hi - lo) / 255, 2**-126)
    zero    z_r = clamp(-round(lo / s_r), 0, 255)               the level that stands for 0
    levels  q_r = clamp(round(x / s_r) + z_r, 0, 255)           uint8
    result  mean_r(s_r (q_r - z_r))

so that the result is off by at most ``mean_r(s_r) / 2``; ties are rounded to even. Zero is always
exact. The least scale is the smallest normal number: torch's, 2**-23, loses all gradients of at
most 2**-24. A NaN or infinity shows in the scale of its row, which is then not finite on any rank;
so does a range beyond the largest float32.

Levels, scales and zeros of all ranks are gathered and added up in the order of ranks: all ranks get
the same bits. Both gathers start in the hook itself, because a rank needs only its own scales for
its levels. Nothing waits.

Source: torch documentation, torch.ao.quantization, ``MinMaxObserver`` and
``PerChannelMinMaxObserver`` (quint8, affine); hooks of the same names in
torch.distributed.algorithms, ``ddp_comm_hooks.quantization_hooks``. Torch's hooks pad a bucket
whose size is a multiple of ``bucket_size`` with one more row, and fail on Gloo.
"""

import torch
import torch.distributed as dist

from hooks_ref._buckets import in_rows
from hooks_ref._collectives import gather, when_all
from hooks_ref._state import check_int
from hooks_ref.default_hooks import allreduce_hook, real_view

LEVELS = 255
LEAST_SCALE = 2.0**-126


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in eight bits per element, with one scale and zero for the whole bucket.

    Args:
        process_group: the group to average over; None is the default group.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``. A sparse bucket is
            averaged without quantization.

    Returns:
        A future of the approximate mean: the bucket's own buffer, shape ``[numel]``; the same bits
        on all ranks.
    """
    return _hook(process_group, bucket, None)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in eight bits per element, with one scale and zero for each row.

    Args:
        process_group: the group to average over; None is the default group.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``. A sparse bucket is
            averaged without quantization.
        bucket_size: number of elements in a row, at least 1; a smaller bucket is one row. Shorter
            rows are more exact, and cost two more numbers for each row.

    Returns:
        A future of the approximate mean: the bucket's own buffer, shape ``[numel]``; the same bits
        on all ranks.

    Raises:
        TypeError, ValueError: ``bucket_size`` is out of its range; the message names it.
    """
    return _hook(process_group, bucket, check_int("bucket_size", bucket_size, 1))


def _hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket, width: int | None
) -> torch.futures.Future[torch.Tensor]:
    group = process_group if process_group is not None else dist.group.WORLD
    buffer = bucket.buffer()
    if buffer.is_sparse:
        return allreduce_hook(process_group, bucket)
    numbers = real_view(buffer)
    wide = in_rows(numbers, width or numbers.numel()).to(
        torch.float64 if numbers.dtype == torch.float64 else torch.float32
    )
    scales, levels = _quantize(wide)
    (every_scale, every_level), works = gather([scales, levels], group)

    def dequantize() -> torch.Tensor:
        total = scales.new_zeros(levels.shape)
        for (scale, zero), level in zip(every_scale, every_level, strict=True):
            total += (level.to(total.dtype) - zero) * scale
        numbers.copy_(total.div_(group.size()).view(-1)[: numbers.numel()])
        return buffer

    return when_all(works, dequantize, [every_scale, every_level])


def _quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``rows``, shape ``[rows, width]``.

    Returns:
        Scales and zeros, shape ``[2, rows, 1]``; and levels, uint8, of the shape of ``rows``.
    """
    low, high = rows.aminmax(dim=1, keepdim=True)
    # NaN passes through all of these operations.
    low = low.clamp(max=0)
    high = high.clamp(min=0)
    scale = ((high - low) / LEVELS).clamp(min=LEAST_SCALE)
    zero = (low / scale).round().neg().clamp(0, LEVELS)
    levels = (rows / scale).round_().add_(zero).clamp_(0, LEVELS)
    # No integer is NaN: of a row with NaN, the scale is NaN.
    return torch.stack([scale, zero]), levels.nan_to_num_(0).to(torch.uint8)
