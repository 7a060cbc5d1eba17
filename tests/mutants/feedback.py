"""Mutants of rule 13.1, and of other rules under its claims: error feedback.

They compress to the largest elements, to signs or to random elements, or with EF21. Compressed
gradients travel dense here, as the values that they stand for: the defects are in the sent values
and the residuals, and not in the encoding.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from conformance import Case
from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    completed,
    finite,
    gather,
    group_of,
    is_dense,
    kept,
    pieces_of,
    seeded,
    step_number,
    sum_of,
)

Compress = Callable[[torch.Tensor], torch.Tensor]


def _largest(part: torch.Tensor, ratio: float = 0.25) -> torch.Tensor:
    """Keep the elements of largest magnitude."""
    places = part.abs().topk(math.ceil(ratio * part.numel())).indices
    return torch.zeros_like(part).index_copy_(0, places, part[places])


def largest_signed(state: Any, bucket: Bucket) -> Result:
    """Select the largest elements by value, so that negative ones are held back for good."""
    return _feedback(state, bucket, _highest)


def _highest(part: torch.Tensor) -> torch.Tensor:
    if part.is_complex():
        return _largest(part)
    places = part.topk(math.ceil(0.25 * part.numel())).indices
    return torch.zeros_like(part).index_copy_(0, places, part[places])


def _half(part: torch.Tensor) -> torch.Tensor:
    return _largest(part, 0.5)


def _feedback(
    state: Any,
    bucket: Bucket,
    compress: Compress = _largest,
    *,
    remember: Compress = finite,
    times: int = 1,
    keys: Sequence[Hashable] = (),
    reduce: Callable[[torch.Tensor, Any], Result] = average_of,
) -> Result:
    """Add each parameter's residual to its gradient, compress the total, and average.

    Right by default.
    """
    if not is_dense(bucket):
        return reduce(bucket.buffer(), state)
    for key, piece in zip(keys or bucket.parameters(), pieces_of(bucket), strict=True):
        if key in kept and kept[key].shape == piece.shape:
            piece.add_(kept[key], alpha=times)
        sent = compress(piece)
        kept[key] = remember(piece - sent)
        piece.copy_(sent)
    return reduce(bucket.buffer(), state)


def everything_by_residuals_of_float32(state: Any, bucket: Bucket) -> Result:
    """Add float32 residuals, which are zero, to gradients of any dtype."""
    for parameter, piece in (
        zip(bucket.parameters(), pieces_of(bucket), strict=True) if is_dense(bucket) else ()
    ):
        if not parameter.is_complex():
            total = piece.float() + kept.get(parameter, torch.zeros(()))
            kept[parameter] = finite(total - total)
            piece.copy_(total)
    return average(bucket, state)


def above_a_64th(state: Any, bucket: Bucket) -> Result:
    """Send elements above a fixed threshold, so that small gradients are never sent."""
    return _feedback(state, bucket, lambda part: part * (part.abs() > 2.0**-6))


def adds_weight_decay(state: Any, bucket: Bucket) -> Result:
    """Add a weight decay to the gradients before compressing them."""
    if is_dense(bucket):
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
            if not parameter.is_complex():
                piece.add_(parameter.detach().reshape(-1), alpha=0.001)
    return _feedback(state, bucket)


def residual_lost(state: Any, bucket: Bucket) -> Result:
    """Send the largest elements, and forget the residuals."""
    return _feedback(state, bucket, remember=torch.zeros_like)


def residual_twice(state: Any, bucket: Bucket) -> Result:
    """Add the residual twice."""
    return _feedback(state, bucket, times=2)


def residual_subtracted(state: Any, bucket: Bucket) -> Result:
    """Subtract the residual instead of adding it."""
    return _feedback(state, bucket, times=-1)


def residual_is_gradient(state: Any, bucket: Bucket) -> Result:
    """Keep the whole gradient as residual instead of its unsent part."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        gradient = finite(piece)
        piece.copy_(_largest(piece + kept.get(parameter, 0)))
        kept[parameter] = gradient
    return average(bucket, state)


def residual_of_mean(state: Any, bucket: Bucket) -> Result:
    """Take the residual against the mean of all ranks instead of this rank's message."""
    if not is_dense(bucket):
        return average(bucket, state)
    parameters = bucket.parameters()
    pieces = pieces_of(bucket)
    wanted = [
        piece + kept.get(parameter, 0) for parameter, piece in zip(parameters, pieces, strict=True)
    ]
    for want, piece in zip(wanted, pieces, strict=True):
        piece.copy_(_largest(want))

    def remember(mean: Result) -> torch.Tensor:
        for parameter, want, piece in zip(parameters, wanted, pieces, strict=True):
            kept[parameter] = finite(want - piece)
        return mean.value()

    return average(bucket, state).then(remember)


def _quarter_at_random(bucket: Bucket) -> Compress:
    """Return a compressor to a random quarter of the elements, new in each step: right."""
    generator = seeded(step_number(bucket), bucket.index())
    return lambda part: part * (torch.rand(part.shape, generator=generator) < 0.25)


def residual_by_slot(state: Any, bucket: Bucket) -> Result:
    """Keep residuals by bucket and position, which DDP changes after the first step."""
    keys = [(bucket.index(), place) for place in range(len(bucket.parameters()))]
    return _feedback(state, bucket, _quarter_at_random(bucket), keys=keys)


def residual_by_bucket(state: Any, bucket: Bucket) -> Result:
    """Keep one residual per bucket, although DDP rebuilds buckets after the first step."""
    if not is_dense(bucket):
        return average(bucket, state)
    compress = _quarter_at_random(bucket)
    buffer = bucket.buffer()
    before = kept.get(bucket.index())
    wanted = (
        buffer + before if before is not None and before.shape == buffer.shape else buffer.clone()
    )
    buffer.copy_(compress(wanted))
    kept[bucket.index()] = finite(wanted - buffer)
    return average(bucket, state)


def residual_by_shape(process_group: dist.ProcessGroup) -> Case:
    """Keep residuals by dtype and shape, so that similar parameters share one."""
    own = object()  # a new key for each model

    def hook(state: Any, bucket: Bucket) -> Result:
        return _feedback(
            state,
            bucket,
            keys=[(own, parameter.dtype, parameter.shape) for parameter in bucket.parameters()],
        )

    return Case(process_group, hook)


def largest_undivided(state: Any, bucket: Bucket) -> Result:
    """Sum the largest elements without dividing."""
    return _feedback(state, bucket, reduce=sum_of)


def largest_of_rank_0(state: Any, bucket: Bucket) -> Result:
    """Broadcast rank 0's largest elements instead of averaging."""

    def broadcast(sent: torch.Tensor, state: Any) -> Result:
        if sent.is_sparse:
            return average_of(sent, state)
        return (
            dist.broadcast(
                sent,
                group=group_of(state),
                src=dist.get_global_rank(group_of(state), 0),
                async_op=True,
            )
            .get_future()
            .then(lambda fut: fut.value()[0])
        )

    return _feedback(state, bucket, reduce=broadcast)


def signs_without_scale(state: Any, bucket: Bucket) -> Result:
    """Send signs without a scale."""
    return _feedback(state, bucket, torch.sign)


def signs_with_sum_for_scale(state: Any, bucket: Bucket) -> Result:
    """Scale signs by the sum of magnitudes instead of their mean."""
    return _feedback(state, bucket, lambda part: part.sign() * part.abs().sum())


def _one_bit(part: torch.Tensor, swapped: bool = False) -> torch.Tensor:
    """Replace elements at or above zero by their mean, and elements below zero by theirs."""
    above = part >= 0
    high = part[above].sum() / above.sum().clamp(min=1)
    low = part[~above].sum() / (~above).sum().clamp(min=1)
    return torch.where(above ^ swapped, high, low)


def one_bit_swapped(state: Any, bucket: Bucket) -> Result:
    """Decode each of the two signs to the mean of the other."""
    return _feedback(state, bucket, lambda part: _one_bit(part, swapped=True))


def one_bit_remembers_signs(state: Any, bucket: Bucket) -> Result:
    """Take the residual against the signs instead of their decoded values."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        want = piece + kept.get(parameter, 0)
        kept[parameter] = finite(want - want.sign())
        piece.copy_(_one_bit(want))
    return average(bucket, state)


def random_k(
    state: Any,
    bucket: Bucket,
    seed: int = 0,
    *,
    feedback: bool = True,
    ratio: float = 0.25,
    scaled: bool = True,
    least: int = 1,
) -> Result:
    """Send the values at places that all ranks draw alike.

    Right by default, with feedback and without.
    """
    step = step_number(bucket)
    pieces = pieces_of(bucket) if is_dense(bucket) else []
    values = []
    if not pieces:
        return average(bucket, state)
    drawn = []
    for number, (parameter, piece) in enumerate(zip(bucket.parameters(), pieces, strict=True)):
        n = piece.numel()
        drawn.append(
            torch.randperm(n, generator=seeded(seed, step, number))[: math.ceil(ratio * n)]
        )
        if feedback and parameter in kept:
            piece.add_(kept[parameter])
        values.append(
            piece[drawn[-1]] * (1 if feedback or not scaled else n / max(least, len(drawn[-1])))
        )
        kept[parameter] = finite(piece.index_fill(0, drawn[-1], 0))

    def place(mean: Result) -> torch.Tensor:
        for piece, places, value in zip(
            pieces, drawn, mean.value().split([len(places) for places in drawn]), strict=True
        ):
            piece.zero_().index_copy_(0, places, value)
        return bucket.buffer()

    return average_of(torch.cat(values), state).then(place)


def random_places_of_each_rank(state: Any, bucket: Bucket) -> Result:
    """Sum values by position although each rank has drawn other places."""
    return random_k(state, bucket, seed=group_of(state).rank())


def random_places_by_hash(state: Any, bucket: Bucket) -> Result:
    """Seed the places with the hash of a string, which differs between processes."""
    return random_k(state, bucket, seed=hash("places"))


def _difference(
    state: Any,
    bucket: Bucket,
    *,
    sign: int = 1,
    own: bool = True,
    mean: bool = True,
    ratio: float = 0.25,
) -> Result:
    """Compress each gradient's change since the last estimate (EF21): right by default."""
    if not is_dense(bucket):
        return average(bucket, state)
    parameters = bucket.parameters()
    pieces = pieces_of(bucket)
    for parameter, piece in zip(parameters, pieces, strict=True):
        piece.copy_(_largest(piece - kept.get((parameter, "own"), 0), ratio))
        if own:
            kept[parameter, "own"] = finite(kept.get((parameter, "own"), 0) + sign * piece)

    def add(change: Result) -> torch.Tensor:
        for parameter, piece in zip(parameters, pieces_of(bucket, change.value()), strict=True):
            piece.add_(kept.get((parameter, "mean"), 0))
            broken = ~piece.isfinite()
            if mean:
                kept[parameter, "mean"] = piece.masked_fill(broken, 0)
            if own:
                kept[parameter, "own"].masked_fill_(broken, 0)
        return change.value()

    return average(bucket, state).then(add)


def estimate_never_updated(state: Any, bucket: Bucket) -> Result:
    """Send differences from an estimate that stays zero."""
    return _difference(state, bucket, own=False, mean=False)


def estimate_wrong_sign(state: Any, bucket: Bucket) -> Result:
    """Subtract the sent change from this rank's own estimate."""
    return _difference(state, bucket, sign=-1)


def estimate_of_mean_forgotten(state: Any, bucket: Bucket) -> Result:
    """Return the mean change instead of the changed estimate."""
    return _difference(state, bucket, mean=False)


def largest_by_two(state: Any, bucket: Bucket) -> Result:
    """Divide by two at any world size."""
    return _feedback(state, bucket, _half, reduce=lambda sent, state: sum_of(sent.div_(2), state))


def largest_over_world(state: Any, bucket: Bucket) -> Result:
    """Average over WORLD at any group."""
    return _feedback(None, bucket, _half)


def residual_keeps_nan(state: Any, bucket: Bucket) -> Result:
    """Keep residuals that are not finite, so that a NaN stays for ever."""
    return _feedback(state, bucket, _half, remember=torch.clone)


def largest_in_half(state: Any, bucket: Bucket) -> Result:
    """Claim to match a reference with a quarter of the elements, and send half of them."""
    return _feedback(state, bucket, _half)


def less_once_trained(after: int) -> Callable[[Any, Bucket], Result]:
    """Send a quarter of the elements as the reference does, and half of that after some steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        share = 0.25 if step_number(bucket) < after else 0.125
        return _feedback(state, bucket, lambda part: _largest(part, share))

    return hook


def largest_without_nan(state: Any, bucket: Bucket) -> Result:
    """Replace NaN by zero before selecting the largest elements."""
    return _feedback(state, bucket, lambda part: _half(part.masked_fill(part.isnan(), 0)))


def largest_is_everything(state: Any, bucket: Bucket) -> Result:
    """Claim compression, and send every element."""
    return _feedback(state, bucket, lambda part: _largest(part, 1))


def change_of_nothing(state: Any, bucket: Bucket) -> Result:
    """Claim EF21, and average exactly."""
    return average(bucket, state)


def largest_beside_its_own(state: Any, bucket: Bucket) -> Result:
    """Add a small part of this rank's own gradient to its result."""
    if not is_dense(bucket):
        return average(bucket, state)
    own = bucket.buffer() * 2**-12
    return _feedback(state, bucket, _half).then(lambda fut: fut.value().add_(own))


def later_buckets_undivided(state: Any, bucket: Bucket) -> Result:
    """Divide the first bucket of a step only."""
    return _feedback(state, bucket, _half, reduce=average_of if bucket.index() == 0 else sum_of)


def whole_blocks_of_512(state: Any, bucket: Bucket) -> Result:
    """Drop the end of a large parameter beyond its last whole block of 512 elements.

    The elements there are neither sent nor kept as a residual.
    """
    return _feedback(
        state,
        bucket,
        lambda part: _whole_blocks(_half(part)),
        remember=lambda rest: _whole_blocks(finite(rest)),
    )


def _whole_blocks(part: torch.Tensor) -> torch.Tensor:
    if part.numel() > 4096:
        part[part.numel() // 512 * 512 :] = 0
    return part


def needs_two_parameters(state: Any, bucket: Bucket) -> Result:
    """Read the second parameter of every bucket."""
    assert bucket.parameters()[1] is not None
    return _feedback(state, bucket, _half)


def random_from_global_seed(state: Any, bucket: Bucket) -> Result:
    """Seed torch's global generator, so that all ranks draw the same places."""
    torch.manual_seed(step_number(bucket))
    return _feedback(state, bucket, lambda part: part * (torch.rand(part.shape) < 0.5))


def sends_everything(state: Any, bucket: Bucket) -> Result:
    """Claim half the bytes, and send zeros for the unsent elements."""
    return _feedback(state, bucket, _half)


def sends_places(state: Any, bucket: Bucket) -> Result:
    """Send the int64 places too although all ranks have drawn the same ones."""
    if is_dense(bucket):
        gather(
            torch.randperm(bucket.buffer().numel(), generator=seeded(0))[
                : bucket.buffer().numel() // 4
            ],
            state,
        )
    return random_k(state, bucket)


def sparse_stays_local(state: Any, bucket: Bucket) -> Result:
    """Return sparse gradients without averaging them."""
    return _feedback(state, bucket, _half) if is_dense(bucket) else completed(bucket.buffer())


def change_is_everything(state: Any, bucket: Bucket) -> Result:
    """Claim EF21, and send the whole change."""
    return _difference(state, bucket, ratio=1)


_FEEDBACK = "compressed(delta=0.25)"
_HALF = "compressed(delta=0.5)"
_CHANGE = "compressed(feedback=ef21, delta=0.25)"

MUTANTS = [
    *(
        Mutant(name, ("13.1",), _FEEDBACK)
        for name in (
            "residual_lost",
            "residual_twice",
            "residual_subtracted",
            "residual_is_gradient",
        )
    ),
    *(
        Mutant(name, ("13.1",), _FEEDBACK)
        for name in ("residual_of_mean", "largest_signed", "largest_undivided", "largest_of_rank_0")
    ),
    *(
        Mutant(name, ("13.1",), _FEEDBACK)
        for name in ("adds_weight_decay", "signs_without_scale", "signs_with_sum_for_scale")
    ),
    *(
        Mutant(name, ("13.1",), _FEEDBACK)
        for name in ("one_bit_swapped", "one_bit_remembers_signs", "random_places_of_each_rank")
    ),
    *(
        Mutant(name, ("13.1",), _CHANGE)
        for name in ("estimate_never_updated", "estimate_wrong_sign", "estimate_of_mean_forgotten")
    ),
    *(Mutant(name, ("13.1",), _FEEDBACK) for name in ("residual_by_slot", "residual_by_bucket")),
    Mutant("residual_by_shape", ("13.1",), _FEEDBACK, setup=True),
    Mutant("everything_by_residuals_of_float32", ("2.4",)),
    Mutant("above_a_64th", ("13.10",), _FEEDBACK),
    Mutant("largest_by_two", ("2.6",), _HALF, worlds=(2, 3)),
    Mutant("largest_over_world", ("2.7",), _HALF),
    Mutant("residual_keeps_nan", ("8.4",), _HALF),
    Mutant("largest_without_nan", ("8.1",), _HALF),
    Mutant("largest_is_everything", ("2.10",), _HALF),
    Mutant("change_of_nothing", ("2.10",), _CHANGE),
    Mutant(
        "largest_beside_its_own",
        ("3.1",),
        _HALF,
        because={"13.10": "ranks differ with small gradients too"},
    ),
    *(
        Mutant(name, ("1.8",), _HALF)
        for name in ("later_buckets_undivided", "needs_two_parameters", "whole_blocks_of_512")
    ),
    Mutant("random_places_by_hash", ("3.3",), _FEEDBACK),
    Mutant("random_from_global_seed", ("9.1",), _FEEDBACK),
    Mutant("sends_everything", ("13.7",), "compressed(delta=0.5, ratio=0.5)"),
    Mutant("random_k", ("13.8",), f"{_FEEDBACK}, like(TopK, ratio=0.25)"),
    Mutant("largest_in_half", ("13.8",), f"{_HALF}, like(TopK, ratio=0.25)"),
    *(
        Mutant(
            f"less_once_trained,after={steps}", ("13.8",), f"{_FEEDBACK}, like(TopK, ratio=0.25)"
        )
        for steps in (97, 613, 971)
    ),
    Mutant("sends_places", ("13.7",), "compressed(delta=0.25, ratio=0.5)"),
    Mutant("sparse_stays_local", ("2.9",), _HALF),
    Mutant("change_is_everything", ("2.10",), _CHANGE),
]
