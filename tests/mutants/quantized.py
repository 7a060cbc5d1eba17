"""Mutants of rule 13.2, and of other rules under its claim: quantization without feedback."""

import math
from typing import Any

import torch

from tests.mutants import ZEROS, Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    call_number,
    completed,
    gather,
    group_of,
    is_dense,
    kept,
    step_number,
    sum_of,
)


def _quantized(
    rows: torch.Tensor,
    *,
    levels: int = 255,
    least: float = 2.0**-100,
    low: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    most: int | None = None,
) -> torch.Tensor:
    """Round to 256 levels between the smallest and the largest value, with zero among them.

    Right by default.
    """
    if not rows.numel():
        return rows
    low = rows.amin().clamp(max=0) if low is None else low
    scale = ((rows.amax().clamp(min=0) - low) / levels).clamp(min=least) if scale is None else scale
    zero = (low / scale).round().neg()
    level = ((rows / scale).round() + zero).clamp(0, levels if most is None else most)
    return (level - zero) * scale


def widened(bucket: Bucket) -> torch.Tensor:
    """Return a copy of the bucket in float32 or wider, or the buffer if it is as wide already."""
    return bucket.buffer().to(torch.promote_types(bucket.buffer().dtype, torch.float32))


def send_mean(bucket: Bucket, sent: torch.Tensor, state: Any) -> Result:
    """Average ``sent``, and write the mean to the bucket."""
    buffer = bucket.buffer()
    return average_of(sent, state).then(lambda fut: buffer.copy_(fut.value()))


def four_bits_of_eight(state: Any, bucket: Bucket) -> Result:
    """Scale for 256 levels, and clamp to 16."""
    if not is_dense(bucket):
        return average(bucket, state)
    return send_mean(bucket, _quantized(widened(bucket), most=15), state)


def quantized_undivided(state: Any, bucket: Bucket) -> Result:
    """Sum the decoded gradients without dividing."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    return sum_of(_quantized(widened(bucket)), state).then(lambda fut: buffer.copy_(fut.value()))


def zero_of_rank_0(state: Any, bucket: Bucket) -> Result:
    """Decode the levels of all ranks with the scale and zero of rank 0."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide = widened(bucket)
    buffer = bucket.buffer()
    low = wide.amin().clamp(max=0)
    scale = ((wide.amax().clamp(min=0) - low) / 255).clamp(min=2.0**-100)
    levels = ((wide - low) / scale).round()
    first = gather(torch.stack([low, scale]), state)[0]
    return average_of(levels, state).then(
        lambda fut: buffer.copy_(fut.value() * first[1] + first[0])
    )


def decodes_by_own_scale(state: Any, bucket: Bucket) -> Result:
    """Sum the levels of all ranks, and decode the sum with this rank's scale."""
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = widened(bucket)
    buffer = bucket.buffer()
    scale = (wide.abs().amax() / 127).clamp(min=2.0**-100)
    return average_of((wide / scale).round(), state).then(
        lambda fut: buffer.copy_(fut.value() * scale)
    )


def calibrates_once(state: Any, bucket: Bucket) -> Result:
    """Keep the range of the first step."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide = widened(bucket)
    key = (bucket.index(), wide.numel(), wide.dtype)
    if key not in kept:
        low = wide.amin().clamp(max=0)
        kept[key] = torch.stack(
            [low, ((wide.amax().clamp(min=0) - low) / 255).clamp(min=2.0**-100)]
        )
    return send_mean(bucket, _quantized(wide, low=kept[key][0], scale=kept[key][1]), state)


def magnitudes_only(state: Any, bucket: Bucket) -> Result:
    """Use unsigned levels, so that negative values become zero."""
    if not is_dense(bucket):
        return average(bucket, state)
    return send_mean(bucket, _quantized(widened(bucket), low=torch.zeros(())), state)


def range_without_zero(state: Any, bucket: Bucket) -> Result:
    """Leave zero out of the range, so that a range of one value has no width."""
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = widened(bucket)
    low, high = wide.aminmax()
    scale = ((high - low) / 255).clamp(min=2.0**-23)
    zero = (low / scale).round().neg().clamp(0, 255)
    return send_mean(bucket, (((wide / scale).round() + zero).clamp(0, 255) - zero) * scale, state)


def own_part_unquantized(state: Any, bucket: Bucket) -> Result:
    """Add this rank's own gradient unquantized, and the others' quantized."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide = widened(bucket)
    buffer = bucket.buffer()
    parts = gather(_quantized(wide), state)
    parts[group_of(state).rank()] = wide
    return completed(buffer.copy_(torch.stack(parts).mean(0)))


def drops_tail_of_rows(state: Any, bucket: Bucket) -> Result:
    """Quantize rows of 4096 elements, and drop an incomplete last row."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide = widened(bucket)
    whole = wide.numel() // 4096 * 4096 or wide.numel()
    wide[whole:] = 0
    return send_mean(bucket, _quantized(wide), state)


def quantized_range_nan(state: Any, bucket: Bucket) -> Result:
    """Ignore NaN in the range, so that its integer level stands for zero."""
    if not is_dense(bucket):
        return average(bucket, state)
    return send_mean(bucket, _quantized(widened(bucket).nan_to_num_(0, math.inf, -math.inf)), state)


def levels_no_finer_than_a_64th(state: Any, bucket: Bucket) -> Result:
    """Bound the scale below by 1/64, far above most gradients."""
    if not is_dense(bucket):
        return average(bucket, state)
    return send_mean(bucket, _quantized(widened(bucket), least=2.0**-6), state)


def zero_by_zero(state: Any, bucket: Bucket) -> Result:
    """Divide by a range that may be zero."""
    if not is_dense(bucket):
        return average(bucket, state)
    return send_mean(bucket, _quantized(widened(bucket), least=0), state)


def quantizes_too_soon(state: Any, bucket: Bucket) -> Result:
    """Quantize in the last step of the warm-up (< instead of <=)."""
    if step_number(bucket) < 1 or not is_dense(bucket):
        return average(bucket, state)
    return send_mean(bucket, _quantized(widened(bucket)), state)


def quantizes_nothing(state: Any, bucket: Bucket) -> Result:
    """Claim quantization, and average exactly."""
    return average(bucket, state)


def quantizes_after_two_calls(state: Any, bucket: Bucket) -> Result:
    """Count calls instead of steps in the warm-up."""
    if call_number() < 2 or not is_dense(bucket):
        return average(bucket, state)
    return send_mean(bucket, _quantized(widened(bucket)), state)


_LEVELS = "compressed(feedback=False, delta=0.99)"
_far_apart = dict.fromkeys(("1.8", "13.10"), "the ranks' scales are far apart in its scenarios")
_long = {"1.7": "its only bucket has an incomplete row too"}

MUTANTS = [
    *(
        Mutant(name, ("13.2",), _LEVELS)
        for name in (
            "four_bits_of_eight",
            "quantized_undivided",
            "calibrates_once",
            "magnitudes_only",
        )
    ),
    Mutant("decodes_by_own_scale", ("3.1",), _LEVELS, because=_far_apart),
    Mutant("zero_of_rank_0", ("13.2",), "compressed(feedback=False, delta=0.999)"),
    Mutant("range_without_zero", ("2.5",), _LEVELS),
    Mutant("own_part_unquantized", ("3.1",), _LEVELS),
    Mutant("drops_tail_of_rows", ("1.8", "1.7"), _LEVELS, because=_long),
    Mutant("quantized_range_nan", ("8.1",), _LEVELS),
    Mutant("zero_by_zero", ("8.3",), _LEVELS, because=ZEROS),
    Mutant("levels_no_finer_than_a_64th", ("13.10",), _LEVELS),
    Mutant("quantizes_too_soon", ("13.4",), f"{_LEVELS}, warmup(2)"),
    Mutant("quantizes_nothing", ("2.10",), _LEVELS),
    Mutant("quantizes_after_two_calls", ("13.4",), f"{_LEVELS}, warmup(2)"),
]
