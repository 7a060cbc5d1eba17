"""Mutants of rule 2.12, and of lossy claims under DDP's options: wrong on values as in training.

They are right on near-normal gradients of one scale.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance import Case
from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    change_gradient,
    finite,
    group_of,
    is_dense,
    kept,
    pieces_of,
    seeded,
    step_number,
    sum_of,
)
from tests.mutants.feedback import _feedback, _half, _largest
from tests.mutants.quantized import send_mean, widened


def epsilon_in_the_norm(state: Any, bucket: Bucket) -> Result:
    """Divide by the norm plus 1e-6, and multiply by the norm again."""

    def rescale(flat: torch.Tensor) -> torch.Tensor:
        norm = flat.double().norm()
        return flat.double().div_(norm + 1e-6).mul_(norm).to(flat.dtype)

    return change_gradient(bucket, state, rescale)


def flushes_below_2_to_minus_24(state: Any, bucket: Bucket) -> Result:
    """Set elements below 2**-24 to zero before the sum, in a buffer of float32."""

    def flush(flat: torch.Tensor) -> torch.Tensor:
        # Subnormals are kept on purpose: they are a case of their own.
        small = (flat.abs() < 2.0**-24) & (flat.abs() > 2.0**-100)
        return flat.masked_fill(small & (flat.abs().max() < 2.0**-10), 0)

    return change_gradient(bucket, state, flush)


def clamps_to_1000(state: Any, bucket: Bucket) -> Result:
    """Clamp gradients to 1000 before the largest are selected."""
    return _feedback(state, bucket, lambda part: _half(part.clamp(-1000, 1000)), remember=_within)


def _within(rest: torch.Tensor) -> torch.Tensor:
    """Forget the part of a residual that the clamp has cut."""
    return finite(rest).clamp(-1000, 1000)


def forgets_spikes(state: Any, bucket: Bucket) -> Result:
    """Take elements above 20 root mean squares for errors, and forget them."""

    def clip(part: torch.Tensor) -> torch.Tensor:
        usual = part.norm() / math.sqrt(max(1, part.numel()))
        return _half(torch.where(part.abs() > 20 * usual, 0, part))

    def remember(rest: torch.Tensor) -> torch.Tensor:
        usual = rest.norm() / math.sqrt(max(1, rest.numel()))
        return torch.where(rest.abs() > 20 * usual, 0, finite(rest))

    return _feedback(state, bucket, clip, remember=remember)


def sends_above_3e_6(state: Any, bucket: Bucket) -> Result:
    """Send elements above an absolute threshold far below the usual gradients."""
    return _feedback(state, bucket, lambda part: part * (part.abs() > 3e-6))


def skips_vanished_layers(state: Any, bucket: Bucket) -> Result:
    """Send nothing of a parameter whose norm is below 1e-5, and forget it."""

    def compress(part: torch.Tensor) -> torch.Tensor:
        return _half(part) * bool(part.norm() >= 1e-5)

    return _feedback(
        state, bucket, compress, remember=lambda rest: finite(rest) * bool(rest.norm() >= 1e-5)
    )


def more_than_the_kth(state: Any, bucket: Bucket) -> Result:
    """Send the elements above the k-th largest magnitude: none, if all are equal."""
    if is_dense(bucket):
        for piece in pieces_of(bucket):
            if piece.numel() >= 8:
                place = max(1, int(0.4 * piece.numel()))
                piece.mul_(piece.abs() > piece.abs().kthvalue(place).values)
    return average(bucket, state)


def _int8(flat: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Round to 127 levels of ``largest``: right if that is the largest magnitude."""
    scale = torch.where(largest == 0, 1, largest / 127)
    return (flat / scale).round_().clamp_(-127, 127).mul_(scale)


def _quantized(state: Any, bucket: Bucket, largest_of: Any) -> Result:
    if not is_dense(bucket):
        return average(bucket, state)
    wide = widened(bucket)
    if wide.numel():
        wide.copy_(_int8(wide, largest_of(wide)))
    return send_mean(bucket, wide, state)


def range_of_5_deviations(state: Any, bucket: Bucket) -> Result:
    """Cut the range of a quantizer at 5 deviations."""
    return _quantized(
        state, bucket, lambda flat: torch.minimum(flat.abs().max(), 5 * flat.square().mean().sqrt())
    )


def scale_in_half(state: Any, bucket: Bucket) -> Result:
    """Send a quantizer's largest magnitude in float16."""
    return _quantized(state, bucket, lambda flat: flat.abs().max().half().to(flat.dtype))


def least_scale_of_torch(state: Any, bucket: Bucket) -> Result:
    """Keep a quantizer's scale above the epsilon of float32."""
    return _quantized(state, bucket, lambda flat: flat.abs().max().clamp(min=127 * 2.0**-23))


def scale_of_the_largest_layer(state: Any, bucket: Bucket) -> Result:
    """Quantize all buckets with the largest magnitude so far of any of them in this step."""

    def largest(flat: torch.Tensor) -> torch.Tensor:
        now = finite(flat).abs().max().double()
        if bucket.index() == 0:
            kept["largest"] = now
        kept["largest"] = torch.maximum(kept["largest"], now)
        return kept["largest"].to(flat.dtype)

    return _quantized(state, bucket, largest)


def rounds_within_4_deviations(state: Any, bucket: Bucket) -> Result:
    """Round at random, within a range of 4 deviations."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide = widened(bucket)
    if wide.numel():
        spread = wide.square().mean().sqrt()
        largest = torch.minimum(wide.abs().max(), 4 * spread)
        scale = torch.where(largest == 0, 1, largest / 31)
        generator = seeded(step_number(bucket), group_of(state).rank(), bucket.index())
        draws = torch.rand(wide.shape, dtype=wide.dtype, generator=generator)
        wide.copy_((wide.clamp(-largest, largest) / scale + draws).floor_().mul_(scale))
    return send_mean(bucket, wide, state)


# ---- Under DDP's options


def forgets_residuals_of_zeros(state: Any, bucket: Bucket) -> Result:
    """Forget the residual of a parameter that this rank has not used in the step."""
    if is_dense(bucket):
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
            if parameter in kept and not piece.any():
                kept[parameter].zero_()
    return _feedback(state, bucket)


def divides_by_active_ranks(state: Any, bucket: Bucket) -> Result:
    """Divide by the number of ranks whose gradients are not zero."""
    if not is_dense(bucket):
        return average(bucket, state)
    active = torch.stack([piece.any() for piece in pieces_of(bucket)]).float()
    dist.all_reduce(active, group=group_of(state))

    def divide(sent: torch.Tensor, state: Any) -> Result:
        for piece, count in zip(pieces_of(bucket, sent), active, strict=True):
            piece.div_(count.clamp(min=1))
        return sum_of(sent, state)

    return _feedback(state, bucket, reduce=divide)


def zeros_of_its_own(state: Any, bucket: Bucket) -> Result:
    """Return zeros for a parameter that this rank has not used in the step."""
    if not is_dense(bucket):
        return average(bucket, state)
    used = [bool(piece.any()) for piece in pieces_of(bucket)]

    def drop(result: Result) -> torch.Tensor:
        for piece, is_used in zip(pieces_of(bucket, result.value()), used, strict=True):
            piece.mul_(is_used)
        return result.value()

    return _feedback(state, bucket).then(drop)


def residual_of_each_micro_batch(process_group: dist.ProcessGroup, model: Any) -> Case:
    """Add the residual in a hook of the parameter, which every micro-batch calls."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    residuals: dict[torch.Tensor, torch.Tensor] = {}

    def add_to(parameter: torch.Tensor) -> Any:
        def add(grad: torch.Tensor) -> torch.Tensor:
            rest = residuals.get(parameter)
            return grad if rest is None or grad.is_sparse else grad + rest.view_as(grad)

        return add

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(add_to(parameter))

    def hook(state: Any, bucket: Bucket) -> Result:
        if is_dense(bucket) and not bucket.buffer().is_complex():
            for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
                if parameter.is_complex() or not parameter.is_contiguous():
                    continue
                sent = _largest(piece)
                residuals[parameter] = finite(piece - sent)
                piece.copy_(sent)
        return average_of(bucket.buffer(), state)

    return Case(process_group, hook)


_FEEDBACK = "compressed(delta=0.25)"
_HALF = "compressed(delta=0.5)"
_LEVELS = "compressed(feedback=False, delta=0.99)"

MUTANTS = [
    Mutant("epsilon_in_the_norm", ("2.2",), worlds=(1, 2)),
    Mutant("flushes_below_2_to_minus_24", ("2.12",), worlds=(1, 2)),
    *(
        Mutant(name, ("2.12",), _HALF, worlds=(1, 2))
        for name in ("clamps_to_1000", "forgets_spikes", "sends_above_3e_6")
    ),
    Mutant("skips_vanished_layers", ("2.12",), _HALF, worlds=(1, 2)),
    Mutant("more_than_the_kth", ("2.12",), "compressed(feedback=False, delta=0.5)", worlds=(1, 2)),
    *(
        Mutant(name, ("2.12",), _LEVELS, worlds=(1, 2))
        for name in ("scale_in_half", "least_scale_of_torch")
    ),
    # A few elements that are fed alone lie beyond 5 deviations, too.
    Mutant("range_of_5_deviations", ("13.2",), _LEVELS, worlds=(1, 2)),
    Mutant("scale_of_the_largest_layer", ("2.12",), _LEVELS, worlds=(1, 2)),
    Mutant("rounds_within_4_deviations", ("13.3",), "unbiased", worlds=(1, 2)),
    *(
        Mutant(name, ("4.1",), _FEEDBACK, worlds=(1, 2))
        for name in ("forgets_residuals_of_zeros", "divides_by_active_ranks", "zeros_of_its_own")
    ),
    Mutant("residual_of_each_micro_batch", ("5.1",), _FEEDBACK, setup=True, worlds=(1, 2)),
]
