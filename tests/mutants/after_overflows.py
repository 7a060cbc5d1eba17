"""Mutants of rule 8.4: finite results after a NaN, which are wrong for good."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    group_of,
    is_dense,
    kept,
    pieces_of,
    seeded,
    step_number,
    sum_of,
)

_means: dict[torch.nn.Parameter, torch.Tensor] = {}
_largest: dict[torch.nn.Parameter, torch.Tensor] = {}


def _add_to_means(bucket: Bucket, state: Any, rate: float) -> Result:
    """Average changes, and add the means of the memories; these take ``rate`` of the changes."""
    world = group_of(state).size()

    def add(future: torch.futures.Future) -> torch.Tensor:
        total = future.value().div_(world)
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket, total), strict=True):
            memory = _means.setdefault(parameter, torch.zeros_like(piece))
            change = piece.clone()
            piece.add_(memory)
            if change.isfinite().all():
                memory.add_(change, alpha=rate)
        return total

    return sum_of(bucket.buffer(), state).then(add)


def memory_of_diana_begins_anew(state: Any, bucket: Bucket) -> Result:
    """Send the difference from a memory at random (DIANA); the memory of a rank begins anew after a
    NaN, and that of the mean stays.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    step = step_number(bucket)
    rank = group_of(state).rank()
    for number, (parameter, piece) in enumerate(
        zip(bucket.parameters(), pieces_of(bucket), strict=True)
    ):
        if not piece.numel():
            continue
        memory = kept.setdefault(parameter, torch.zeros_like(piece))
        change = piece - memory
        level = change.abs().max() / 7
        level = torch.where(level == 0, 1, level)
        draws = torch.rand(change.shape, generator=seeded(step, rank, bucket.index(), number))
        piece.copy_((change / level + draws.to(change.dtype)).floor() * level)
        if piece.isfinite().all():
            memory.add_(piece, alpha=0.25)
        else:
            memory.zero_()
    return _add_to_means(bucket, state, rate=0.25)


def estimate_begins_anew(state: Any, bucket: Bucket) -> Result:
    """Send the larger changes (EF21); a rank's estimate begins anew after a NaN, and that of the
    mean stays.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        estimate = kept.setdefault(parameter, torch.zeros_like(piece))
        change = piece - estimate
        small = change.abs() < change.abs().mean()
        piece.copy_(change.masked_fill(small, 0))
        if piece.isfinite().all():
            estimate.add_(piece)
        else:
            estimate.zero_()
    return _add_to_means(bucket, state, rate=1.0)


def residual_frozen_by_an_overflow(state: Any, bucket: Bucket) -> Result:
    """Send the larger half with feedback; after an overflow the residual is no longer renewed."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        value = piece + kept.get(parameter, 0)
        small = value.abs() < value.abs().mean()
        if not value.isfinite().all():
            _largest[parameter] = value.new_zeros(())
        elif parameter not in _largest:
            kept[parameter] = torch.where(small, value, 0)
        piece.copy_(value.masked_fill(small, 0))
    return average(bucket, state)


def range_of_all_steps(state: Any, bucket: Bucket) -> Result:
    """Round to 127 levels of the largest element so far, or of the largest number after an infinity
    has come.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        if not piece.numel() or not piece.isfinite().all():
            _largest[parameter] = torch.tensor(torch.finfo(piece.dtype).max)
            continue
        before = _largest.get(parameter, piece.new_zeros(()))
        now = piece.abs().max()
        largest = torch.where(before > 1e30, before, now)
        level = torch.where(largest == 0, 1, largest) / 127
        piece.copy_((piece / level).round() * level)
    return average(bucket, state)


def feedback_ends_with_an_overflow(state: Any, bucket: Bucket) -> Result:
    """Send the larger half with feedback; a parameter that overflows on a rank has no residual
    there any more.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        if parameter not in _largest:
            piece.add_(kept.get(parameter, 0))
        if not piece.isfinite().all():
            _largest[parameter] = piece.new_zeros(())
        small = piece.abs() < piece.abs().mean()
        kept[parameter] = torch.where(small, piece, 0)
        piece.copy_(piece.masked_fill(small, 0))
    return average(bucket, state)


def estimates_begin_with_an_overflow(state: Any, bucket: Bucket) -> Result:
    """Begin the estimates with the first gradient, and send the larger changes later (EF21). If the
    first step overflows on one rank, that rank and the mean begin with zeros, and other ranks with
    their own gradients.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        if parameter not in kept:
            kept[parameter] = piece.nan_to_num(0, 0, 0)
            continue
        change = piece - kept[parameter]
        piece.copy_(change.masked_fill(change.abs() < change.abs().mean(), 0))

    world = group_of(state).size()
    changes = pieces_of(bucket, bucket.buffer().clone())

    def add(future: torch.futures.Future) -> torch.Tensor:
        total = future.value().div_(world)
        pieces = pieces_of(bucket, total)
        for parameter, piece, change in zip(bucket.parameters(), pieces, changes, strict=True):
            is_finite = bool(piece.isfinite().all())
            if parameter not in _means:
                _means[parameter] = piece.nan_to_num(0, 0, 0)
                continue
            piece.add_(_means[parameter])
            if is_finite:
                kept[parameter].add_(change)
                _means[parameter].copy_(piece)
        return total

    return sum_of(bucket.buffer(), state).then(add)


def units_of_the_first_step(state: Any, bucket: Bucket) -> Result:
    """Take gradients to the units of the largest element of the first step, and back again."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        if not piece.numel() or parameter.dtype.is_complex:
            continue
        largest = piece.abs().max()
        if parameter not in _largest:
            _largest[parameter] = torch.where(largest == 0, 1, largest.log2().floor().exp2())
        # A power of two: no bit is lost, but for values near the ends of the range.
        elif 2.0**-60 < largest < 2.0**60:
            piece.div_(_largest[parameter]).mul_(_largest[parameter])
    return average(bucket, state)


MUTANTS = [
    Mutant("memory_of_diana_begins_anew", ("8.4",), "unbiased"),
    Mutant("estimate_begins_anew", ("8.4",), "compressed(feedback=ef21, delta=0.25)"),
    Mutant("residual_frozen_by_an_overflow", ("8.4",), "compressed(delta=0.25)"),
    Mutant("feedback_ends_with_an_overflow", ("8.4",), "compressed(delta=0.25)"),
    Mutant("estimates_begin_with_an_overflow", ("8.4",), "compressed(feedback=ef21, delta=0.25)"),
    Mutant("units_of_the_first_step", ("8.4",)),
    Mutant("range_of_all_steps", ("8.4",), "compressed(feedback=False, delta=0.99)"),
]
