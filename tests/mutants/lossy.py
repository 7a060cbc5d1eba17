"""Section 13 of the rule book, and the others under its claims: compressors, local and fused hooks with one defect each.

What is compressed travels dense here, as the values that it stands for: the defects are in what is
sent and remembered, and not in how it is packed.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    change_gradient,
    change_mean,
    completed,
    gather,
    group_of,
    is_dense,
    step_number,
    sum_of,
)

Compress = Callable[[torch.Tensor], torch.Tensor]

_kept: dict[Hashable, torch.Tensor] = {}  # by parameter, unless the defect is that it is not


def _pieces(bucket: Bucket, flat: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return one flat view per parameter, of ``flat`` or of the bucket's buffer; a complex one in pairs."""
    whole = bucket.buffer() if flat is None else flat
    return list(whole.split([p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters()]))


def _generator(*words: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(words) % 2**31)


def _finite(residual: torch.Tensor) -> torch.Tensor:
    return residual.nan_to_num(0, 0, 0)


# 13.1 Error feedback: the largest elements, signs, random elements


def _largest(part: torch.Tensor, ratio: float = 0.25) -> torch.Tensor:
    """Keep the elements of largest magnitude."""
    places = part.abs().topk(math.ceil(ratio * part.numel())).indices
    return torch.zeros_like(part).index_copy_(0, places, part[places])


def _half(part: torch.Tensor) -> torch.Tensor:
    return _largest(part, 0.5)


def _feedback(
    state: Any,
    bucket: Bucket,
    compress: Compress = _largest,
    *,
    remember: Compress = _finite,
    times: int = 1,
    keys: Sequence[Hashable] = (),
    reduce: Callable[[torch.Tensor, Any], Result] = average_of,
) -> Result:
    """Add what was held back to each parameter's gradient, and average what ``compress`` leaves of it: right by default."""
    if not is_dense(bucket):
        return reduce(bucket.buffer(), state)
    for key, piece in zip(keys or bucket.parameters(), _pieces(bucket), strict=True):
        if key in _kept and _kept[key].shape == piece.shape:
            piece.add_(_kept[key], alpha=times)
        sent = compress(piece)
        _kept[key] = remember(piece - sent)
        piece.copy_(sent)
    return reduce(bucket.buffer(), state)


def residual_lost(state: Any, bucket: Bucket) -> Result:
    """Sends the largest elements, and forgets the others."""
    return _feedback(state, bucket, remember=torch.zeros_like)


def residual_twice(state: Any, bucket: Bucket) -> Result:
    """Adds what was held back twice."""
    return _feedback(state, bucket, times=2)


def residual_subtracted(state: Any, bucket: Bucket) -> Result:
    """Subtracts what was held back."""
    return _feedback(state, bucket, times=-1)


def residual_is_gradient(state: Any, bucket: Bucket) -> Result:
    """Holds back all of the gradient, and not only what was not sent."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), _pieces(bucket), strict=True):
        gradient = _finite(piece)
        piece.copy_(_largest(piece + _kept.get(parameter, 0)))
        _kept[parameter] = gradient
    return average(bucket, state)


def residual_of_mean(state: Any, bucket: Bucket) -> Result:
    """Holds back what the mean of all ranks lacks, and not what this rank has not sent."""
    if not is_dense(bucket):
        return average(bucket, state)
    parameters, pieces = bucket.parameters(), _pieces(bucket)
    wanted = [piece + _kept.get(parameter, 0) for parameter, piece in zip(parameters, pieces, strict=True)]
    for want, piece in zip(wanted, pieces, strict=True):
        piece.copy_(_largest(want))

    def remember(mean: Result) -> torch.Tensor:
        for parameter, want, piece in zip(parameters, wanted, pieces, strict=True):
            _kept[parameter] = _finite(want - piece)
        return mean.value()

    return average(bucket, state).then(remember)


def _quarter_at_random(bucket: Bucket) -> Compress:
    """Return what keeps a quarter of the elements, others at every step: right."""
    generator = _generator(step_number(bucket), bucket.index())
    return lambda part: part * (torch.rand(part.shape, generator=generator) < 0.25)


def residual_by_slot(state: Any, bucket: Bucket) -> Result:
    """Keeps what was held back by bucket and place in it, which DDP changes after the first step."""
    keys = [(bucket.index(), place) for place in range(len(bucket.parameters()))]
    return _feedback(state, bucket, _quarter_at_random(bucket), keys=keys)


def residual_by_bucket(state: Any, bucket: Bucket) -> Result:
    """Keeps what was held back in one tensor for each bucket, though DDP lays it out anew after the first step."""
    if not is_dense(bucket):
        return average(bucket, state)
    compress, buffer = _quarter_at_random(bucket), bucket.buffer()
    before = _kept.get(bucket.index())
    wanted = buffer + before if before is not None and before.shape == buffer.shape else buffer.clone()
    buffer.copy_(compress(wanted))
    _kept[bucket.index()] = _finite(wanted - buffer)
    return average(bucket, state)


def largest_undivided(state: Any, bucket: Bucket) -> Result:
    """Sums the largest elements of all ranks, and divides by nothing."""
    return _feedback(state, bucket, reduce=sum_of)


def largest_of_rank_0(state: Any, bucket: Bucket) -> Result:
    """Takes rank 0's largest elements for those of all."""

    def broadcast(sent: torch.Tensor, state: Any) -> Result:
        if sent.is_sparse:
            return average_of(sent, state)
        return dist.broadcast(sent, group=group_of(state), group_src=0, async_op=True).get_future().then(lambda fut: fut.value()[0])

    return _feedback(state, bucket, reduce=broadcast)


def signs_without_scale(state: Any, bucket: Bucket) -> Result:
    """Sends signs alone: each stands for 1, whatever the gradient's size."""
    return _feedback(state, bucket, torch.sign)


def signs_with_sum_for_scale(state: Any, bucket: Bucket) -> Result:
    """Scales signs by the sum of magnitudes where it should be their mean."""
    return _feedback(state, bucket, lambda part: part.sign() * part.abs().sum())


def _one_bit(part: torch.Tensor, swapped: bool = False) -> torch.Tensor:
    """Replace the elements at or above zero by their mean, and those below by theirs."""
    above = part >= 0
    high = part[above].sum() / above.sum().clamp(min=1)
    low = part[~above].sum() / (~above).sum().clamp(min=1)
    return torch.where(above ^ swapped, high, low)


def one_bit_swapped(state: Any, bucket: Bucket) -> Result:
    """Decodes bits that are set to the mean of the elements below zero."""
    return _feedback(state, bucket, lambda part: _one_bit(part, swapped=True))


def one_bit_remembers_signs(state: Any, bucket: Bucket) -> Result:
    """Holds back the gradient less its signs, and not less what they stand for."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), _pieces(bucket), strict=True):
        want = piece + _kept.get(parameter, 0)
        _kept[parameter] = _finite(want - want.sign())
        piece.copy_(_one_bit(want))
    return average(bucket, state)


def _random_k(state: Any, bucket: Bucket, seed: int = 0, *, feedback: bool = True, ratio: float = 0.25, scaled: bool = True) -> Result:
    """Send elements at places that all ranks draw alike, values only: right by default, with feedback and without."""
    step, pieces, values = step_number(bucket), _pieces(bucket) if is_dense(bucket) else [], []
    if not pieces:
        return average(bucket, state)
    drawn = []
    for number, (parameter, piece) in enumerate(zip(bucket.parameters(), pieces, strict=True)):
        n = piece.numel()
        drawn.append(torch.randperm(n, generator=_generator(seed, step, number))[: math.ceil(ratio * n)])
        if feedback and parameter in _kept:
            piece.add_(_kept[parameter])
        values.append(piece[drawn[-1]] * (1 if feedback or not scaled else n / max(1, len(drawn[-1]))))
        _kept[parameter] = _finite(piece.index_fill(0, drawn[-1], 0))

    def place(mean: Result) -> torch.Tensor:
        for piece, places, value in zip(pieces, drawn, mean.value().split([len(places) for places in drawn]), strict=True):
            piece.zero_().index_copy_(0, places, value)
        return bucket.buffer()

    return average_of(torch.cat(values), state).then(place)


def random_places_of_each_rank(state: Any, bucket: Bucket) -> Result:
    """Sums values by position, though each rank has drawn other places."""
    return _random_k(state, bucket, seed=group_of(state).rank())


def _difference(state: Any, bucket: Bucket, *, sign: int = 1, own: bool = True, mean: bool = True, ratio: float = 0.25) -> Result:
    """Compress the change of each gradient since the last estimate (EF21): right by default."""
    if not is_dense(bucket):
        return average(bucket, state)
    parameters, pieces = bucket.parameters(), _pieces(bucket)
    for parameter, piece in zip(parameters, pieces, strict=True):
        piece.copy_(_largest(piece - _kept.get((parameter, "own"), 0), ratio))
        if own:
            _kept[parameter, "own"] = _finite(_kept.get((parameter, "own"), 0) + sign * piece)

    def add(change: Result) -> torch.Tensor:
        for parameter, piece in zip(parameters, _pieces(bucket, change.value()), strict=True):
            piece.add_(_kept.get((parameter, "mean"), 0))
            broken = ~piece.isfinite()
            if mean:
                _kept[parameter, "mean"] = piece.masked_fill(broken, 0)
            if own:
                _kept[parameter, "own"].masked_fill_(broken, 0)
        return change.value()

    return average(bucket, state).then(add)


def estimate_never_updated(state: Any, bucket: Bucket) -> Result:
    """Sends the largest elements of the difference from an estimate that stays zero."""
    return _difference(state, bucket, own=False, mean=False)


def estimate_wrong_sign(state: Any, bucket: Bucket) -> Result:
    """Subtracts what it has sent from its own estimate."""
    return _difference(state, bucket, sign=-1)


def estimate_of_mean_forgotten(state: Any, bucket: Bucket) -> Result:
    """Returns the mean change, and not the estimate that it changes."""
    return _difference(state, bucket, mean=False)


# Error feedback under the other rules


def largest_by_two(state: Any, bucket: Bucket) -> Result:
    """Divides by two, whatever the world size."""
    return _feedback(state, bucket, _half, reduce=lambda sent, state: sum_of(sent.div_(2), state))


def largest_over_world(state: Any, bucket: Bucket) -> Result:
    """Averages what it sends over WORLD."""
    return _feedback(None, bucket, _half)


def residual_keeps_nan(state: Any, bucket: Bucket) -> Result:
    """Holds back what is not finite too: a NaN less what was sent of it is a NaN for ever."""
    return _feedback(state, bucket, _half, remember=torch.clone)


def largest_without_nan(state: Any, bucket: Bucket) -> Result:
    """Looks for the largest elements among those that are numbers, so that no other is ever sent."""
    return _feedback(state, bucket, lambda part: _half(part.masked_fill(part.isnan(), 0)))


def largest_is_everything(state: Any, bucket: Bucket) -> Result:
    """Says that it compresses, and sends every element."""
    return _feedback(state, bucket, lambda part: _largest(part, 1))


def change_of_nothing(state: Any, bucket: Bucket) -> Result:
    """Says that it compresses the change of the gradient, and averages."""
    return average(bucket, state)


def largest_beside_its_own(state: Any, bucket: Bucket) -> Result:
    """Adds its own small elements to its own result as well, where no other rank has them."""
    if not is_dense(bucket):
        return average(bucket, state)
    own = bucket.buffer() * 2**-12
    return _feedback(state, bucket, _half).then(lambda fut: fut.value().add_(own))


def later_buckets_undivided(state: Any, bucket: Bucket) -> Result:
    """Divides the first bucket of a step alone."""
    return _feedback(state, bucket, _half, reduce=average_of if bucket.index() == 0 else sum_of)


def random_from_global_seed(state: Any, bucket: Bucket) -> Result:
    """Seeds torch's global generator, so that all ranks draw the same places."""
    torch.manual_seed(step_number(bucket))
    return _feedback(state, bucket, lambda part: part * (torch.rand(part.shape) < 0.5))


def sends_everything(state: Any, bucket: Bucket) -> Result:
    """Says that it sends little, and sends a zero for each element that it holds back."""
    return _feedback(state, bucket, _half)


def sends_places(state: Any, bucket: Bucket) -> Result:
    """Sends the places of its random elements too, in int64, though all ranks have drawn the same."""
    if is_dense(bucket):
        gather(torch.randperm(bucket.buffer().numel(), generator=_generator(0))[: bucket.buffer().numel() // 4], state)
    return _random_k(state, bucket)


def sparse_stays_local(state: Any, bucket: Bucket) -> Result:
    """Compresses dense gradients, and leaves sparse ones as they are."""
    return _feedback(state, bucket, _half) if is_dense(bucket) else completed(bucket.buffer())


# 13.1 and 13.4 Low rank


def _low_rank(
    state: Any,
    bucket: Bucket,
    *,
    start: int = 2,
    step: int | None = None,
    feedback: bool = True,
    divide: bool = True,
    share: bool = True,
    vectors: Compress | None = None,
    flip: Callable[[int, int], bool] | None = None,
) -> Result:
    """Send two factors of rank 4 of each matrix, from the third step on, and vectors as they are: right by default."""
    step = step_number(bucket) if step is None else step
    if step < start or not is_dense(bucket):
        return average(bucket, state)
    group = group_of(state)
    for parameter, piece in zip(bucket.parameters(), _pieces(bucket), strict=True):
        n = parameter.size(0) if parameter.dim() > 1 and piece.numel() else 1
        m = piece.numel() // n
        if parameter.is_complex() or 4 * (n + m) >= n * m:
            if vectors is None:
                average_of(piece, state).wait()
            else:
                piece.copy_(vectors(piece))
            continue
        wide = torch.promote_types(piece.dtype, torch.float32)
        matrix = piece.view(n, m).to(wide) + _kept.get(parameter, 0)
        q = _kept[parameter, "q"] if (parameter, "q") in _kept else torch.randn(m, 4, generator=_generator(n, m))
        p = matrix @ torch.linalg.qr(q.to(wide)).Q
        if share:
            average_of(p, state).wait()
        p = torch.linalg.qr(p).Q
        q = (matrix.t() @ p).div_(group.size() if divide else 1)
        sum_of(q, state).wait()
        result = p @ q.t()
        piece.copy_((result.t() if flip is not None and flip(n, m) else result).reshape(-1))
        if feedback:
            _kept[parameter] = _finite(matrix - result)
        _kept[parameter, "q"] = _finite(q)
    return completed(bucket.buffer())


def second_factor_undivided(state: Any, bucket: Bucket) -> Result:
    """Averages the first factor of a matrix, and sums the second one."""
    return _low_rank(state, bucket, divide=False)


def first_factor_unshared(state: Any, bucket: Bucket) -> Result:
    """Averages the second factor of a matrix only: every rank has another first one."""
    return _low_rank(state, bucket, share=False)


def low_rank_error_lost(state: Any, bucket: Bucket) -> Result:
    """Approximates matrices, and forgets what that loses."""
    return _low_rank(state, bucket, feedback=False)


def vectors_stay_local(state: Any, bucket: Bucket) -> Result:
    """Approximates matrices together, and leaves vectors as they are."""
    return _low_rank(state, bucket, vectors=lambda piece: piece)


def result_transposed(state: Any, bucket: Bucket) -> Result:
    """Writes the product of the factors the other way round."""
    return _low_rank(state, bucket, flip=lambda n, m: True)


def tall_result_transposed(state: Any, bucket: Bucket) -> Result:
    """Turns matrices that are taller than wide, and does not turn their result back."""
    return _low_rank(state, bucket, flip=lambda n, m: n > m)


def projects_by_rank(state: Any, bucket: Bucket) -> Result:
    """Sends a random projection of each parameter, and every rank draws another one."""
    if not is_dense(bucket):
        return average(bucket, state)
    step, rank = step_number(bucket), group_of(state).rank()
    for parameter, piece in zip(bucket.parameters(), _pieces(bucket), strict=True):
        rows = torch.nn.functional.pad(piece + _kept.get(parameter, 0), (0, -piece.numel() % 4)).view(-1, 4)
        wide = rows.to(torch.promote_types(piece.dtype, torch.float32))
        directions = torch.linalg.qr(torch.randn(4, 2, generator=_generator(step, rank))).Q.to(wide)
        sent = average_of(wide @ directions, state).wait() @ directions.t()
        _kept[parameter] = _finite((wide - sent).view(-1)[: piece.numel()].to(piece.dtype))
        piece.copy_(sent.view(-1)[: piece.numel()])
    return completed(bucket.buffer())


def warm_up_too_short(state: Any, bucket: Bucket) -> Result:
    """Says that it averages in the first two steps, and does so in one."""
    return _low_rank(state, bucket, start=1)


def warm_up_too_long(state: Any, bucket: Bucket) -> Result:
    """Says that it averages in the first two steps, and does so in three."""
    return _low_rank(state, bucket, start=3)


_calls: list[int] = []


def warm_up_counts_buckets(state: Any, bucket: Bucket) -> Result:
    """Averages the first two buckets, as if each were a step."""
    _calls.append(1)
    return _low_rank(state, bucket, step=len(_calls) - 1)


# 13.2 Quantization


def _quantized(
    rows: torch.Tensor,
    *,
    levels: int = 255,
    least: float = 2.0**-100,
    low: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    most: int | None = None,
) -> torch.Tensor:
    """Round to one of 256 levels between the least and the largest value, zero among them: right by default."""
    if not rows.numel():
        return rows
    low = rows.amin().clamp(max=0) if low is None else low
    scale = ((rows.amax().clamp(min=0) - low) / levels).clamp(min=least) if scale is None else scale
    zero = (low / scale).round().neg()
    level = ((rows / scale).round() + zero).clamp(0, levels if most is None else most)
    return (level - zero) * scale


def _wide(bucket: Bucket) -> torch.Tensor:
    return bucket.buffer().to(torch.promote_types(bucket.buffer().dtype, torch.float32))


def _send(bucket: Bucket, sent: torch.Tensor, state: Any) -> Result:
    """Average ``sent`` in place of the bucket."""
    buffer = bucket.buffer()
    return average_of(sent, state).then(lambda fut: buffer.copy_(fut.value()))


def four_bits_of_eight(state: Any, bucket: Bucket) -> Result:
    """Scales for 256 levels, and has room for 16."""
    if not is_dense(bucket):
        return average(bucket, state)
    return _send(bucket, _quantized(_wide(bucket), most=15), state)


def quantized_undivided(state: Any, bucket: Bucket) -> Result:
    """Sums what it has decoded of all ranks."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    return sum_of(_quantized(_wide(bucket)), state).then(lambda fut: buffer.copy_(fut.value()))


def zero_of_rank_0(state: Any, bucket: Bucket) -> Result:
    """Decodes the levels of all ranks by the scale and zero of rank 0."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide, buffer = _wide(bucket), bucket.buffer()
    low = wide.amin().clamp(max=0)
    scale = ((wide.amax().clamp(min=0) - low) / 255).clamp(min=2.0**-100)
    levels = ((wide - low) / scale).round()
    first = gather(torch.stack([low, scale]), state)[0]
    return average_of(levels, state).then(lambda fut: buffer.copy_(fut.value() * first[1] + first[0]))


def calibrates_once(state: Any, bucket: Bucket) -> Result:
    """Takes its range from the first step, and keeps it."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide = _wide(bucket)
    key = (bucket.index(), wide.numel(), wide.dtype)
    if key not in _kept:
        low = wide.amin().clamp(max=0)
        _kept[key] = torch.stack([low, ((wide.amax().clamp(min=0) - low) / 255).clamp(min=2.0**-100)])
    return _send(bucket, _quantized(wide, low=_kept[key][0], scale=_kept[key][1]), state)


def magnitudes_only(state: Any, bucket: Bucket) -> Result:
    """Takes levels for unsigned ones: what is below zero becomes zero."""
    if not is_dense(bucket):
        return average(bucket, state)
    return _send(bucket, _quantized(_wide(bucket), low=torch.zeros(())), state)


def range_without_zero(state: Any, bucket: Bucket) -> Result:
    """Takes the least value for the lower end of the range even if it is above zero: a range of one value has no width."""
    if not is_dense(bucket) or not bucket.buffer().numel():
        return average(bucket, state)
    wide = _wide(bucket)
    low, high = wide.aminmax()
    scale = ((high - low) / 255).clamp(min=2.0**-23)
    zero = (low / scale).round().neg().clamp(0, 255)
    return _send(bucket, (((wide / scale).round() + zero).clamp(0, 255) - zero) * scale, state)


def own_part_unquantized(state: Any, bucket: Bucket) -> Result:
    """Adds its own gradient to the quantized ones of the others, where they add its quantized one."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide, buffer = _wide(bucket), bucket.buffer()
    parts = gather(_quantized(wide), state)
    parts[group_of(state).rank()] = wide
    return completed(buffer.copy_(torch.stack(parts).mean(0)))


def drops_tail_of_rows(state: Any, bucket: Bucket) -> Result:
    """Quantizes rows of 4096 elements, and drops the last one where it is not full."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide = _wide(bucket)
    whole = wide.numel() // 4096 * 4096 or wide.numel()
    wide[whole:] = 0
    return _send(bucket, _quantized(wide), state)


def quantized_range_nan(state: Any, bucket: Bucket) -> Result:
    """Takes its range from elements that are numbers; levels are integers, so that a NaN becomes zero."""
    if not is_dense(bucket):
        return average(bucket, state)
    return _send(bucket, _quantized(_wide(bucket).nan_to_num_(0, math.inf, -math.inf)), state)


def zero_by_zero(state: Any, bucket: Bucket) -> Result:
    """Divides by a range that may have no width."""
    if not is_dense(bucket):
        return average(bucket, state)
    return _send(bucket, _quantized(_wide(bucket), least=0), state)


def quantizes_too_soon(state: Any, bucket: Bucket) -> Result:
    """Compares with < what it should compare with <=, and quantizes in the last step of the warm-up."""
    if step_number(bucket) < 1 or not is_dense(bucket):
        return average(bucket, state)
    return _send(bucket, _quantized(_wide(bucket)), state)


def quantizes_nothing(state: Any, bucket: Bucket) -> Result:
    """Says that it quantizes, and averages."""
    return average(bucket, state)


# 13.3 Rounding at random


def _at_random(
    state: Any,
    bucket: Bucket,
    level: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    levels: int = 3,
    seed: Callable[[int, int], tuple[int, ...]] = lambda step, rank: (step, rank),
    draw: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None,
) -> Result:
    """Average each parameter in a few levels of its largest magnitude; ``level`` rounds, given numbers in [0, 1)."""
    if not is_dense(bucket):
        return average(bucket, state)
    wide, step = _wide(bucket), step_number(bucket)
    for number, piece in enumerate(_pieces(bucket, wide)):
        if piece.numel():
            largest = piece.abs().amax()
            largest.masked_fill_(largest == 0, 1)
            generator = _generator(*seed(step, group_of(state).rank()), number)
            drawn = torch.rand(piece.shape, dtype=piece.dtype, generator=generator) if draw is None else draw(piece, generator)
            piece.copy_(level((piece / largest).mul_(levels), drawn).mul_(largest).div_(levels))
    return _send(bucket, wide, state)


def _up_or_down(scaled: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Round at random so that the expectation is ``scaled``: right."""
    return (scaled + drawn).floor()


def rounds_to_nearest(state: Any, bucket: Bucket) -> Result:
    """Rounds to the nearest level."""
    return _at_random(state, bucket, lambda scaled, drawn: scaled.round())


def rounds_down(state: Any, bucket: Bucket) -> Result:
    """Forgets to add what it has drawn: every element is rounded down."""
    return _at_random(state, bucket, lambda scaled, drawn: scaled.floor())


def rounds_by_half(state: Any, bucket: Bucket) -> Result:
    """Throws a fair coin between the levels above and below, wherever the element lies between them."""
    return _at_random(state, bucket, lambda scaled, drawn: torch.where(drawn < 0.5, scaled.floor(), scaled.ceil()), levels=1)


def draws_once(state: Any, bucket: Bucket) -> Result:
    """Seeds its draws without the step: they are the same at each."""
    return _at_random(state, bucket, _up_or_down, seed=lambda step, rank: (rank,))


def random_elements_unscaled(state: Any, bucket: Bucket) -> Result:
    """Sends a quarter of the elements, and does not scale them by four."""
    return _random_k(state, bucket, feedback=False, scaled=False)


def random_elements_of_each_rank(state: Any, bucket: Bucket) -> Result:
    """Sums scaled values by position, though each rank has drawn other places."""
    return _random_k(state, bucket, seed=group_of(state).rank(), feedback=False)


def random_levels_undivided(state: Any, bucket: Bucket) -> Result:
    """Rounds at random, and returns the sum."""
    size = group_of(state).size()
    result = _at_random(state, bucket, _up_or_down)
    return result.then(lambda fut: fut.value() * size)


def draws_from_global(state: Any, bucket: Bucket) -> Result:
    """Draws from torch's global generator."""
    return _at_random(state, bucket, _up_or_down, draw=lambda piece, generator: torch.rand_like(piece))


def draws_unseeded(state: Any, bucket: Bucket) -> Result:
    """Draws from a generator that the system's entropy seeds."""

    def draw(piece: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        generator.seed()
        return torch.rand(piece.shape, dtype=piece.dtype, generator=generator)

    return _at_random(state, bucket, _up_or_down, draw=draw)


def dithers_zeros(state: Any, bucket: Bucket) -> Result:
    """Rounds a zero to the least level above it or below it now and then, as if it lay between them."""

    def level(scaled: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return _up_or_down(scaled, drawn).add_((drawn * 3 - 1.5).round_().mul_(scaled == 0))

    return _at_random(state, bucket, level)


def rounds_nothing(state: Any, bucket: Bucket) -> Result:
    """Says that it rounds at random, and averages."""
    return average(bucket, state)


# 13.5 Local results


def _refuse_sparse(bucket: Bucket) -> None:
    """Raise where the gradient is sparse: averaged, it would have other weights than the others of its step."""
    if not is_dense(bucket):
        raise TypeError("no sparse gradients")


def _with_previous(state: Any, bucket: Bucket, mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Result:
    """Mix this rank's gradient with the one of the rank before it."""
    _refuse_sparse(bucket)
    group = group_of(state)
    previous = gather(bucket.buffer(), state)[(group.rank() - 1) % group.size()]
    return completed(mix(bucket.buffer(), previous))


def _three_quarters(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Three quarters of one's own: right."""
    return own.mul_(0.75).add_(other, alpha=0.25)


def never_halves(state: Any, bucket: Bucket) -> Result:
    """Adds the gradient of a neighbour to its own."""
    return _with_previous(state, bucket, torch.add)


def stays_alone_on_errors(state: Any, bucket: Bucket) -> Result:
    """Keeps its own gradient when its neighbour does not answer: a local result, it says."""
    _refuse_sparse(bucket)
    try:
        return _with_previous(state, bucket, lambda own, other: (own + other) / 2)
    except RuntimeError:
        return completed(bucket.buffer())


def own_left_out(state: Any, bucket: Bucket) -> Result:
    """Takes the gradient of a neighbour for its own."""
    return _with_previous(state, bucket, lambda own, other: other)


def everyone_with_rank_0(state: Any, bucket: Bucket) -> Result:
    """Averages with rank 0, which averages with itself."""
    _refuse_sparse(bucket)
    return completed((bucket.buffer() + gather(bucket.buffer(), state)[0]) / 2)


def weights_of_other_ranks(state: Any, bucket: Bucket) -> Result:
    """Trusts its own gradient the more the higher its rank is: not every gradient counts as much over all ranks."""
    weight = 0.25 if group_of(state).rank() == 0 else 0.75
    return _with_previous(state, bucket, lambda own, other: own * weight + other * (1 - weight))


def weights_of_elements(state: Any, bucket: Bucket) -> Result:
    """Mixes the first half of a bucket with a neighbour's, and leaves the other as it is."""

    def mix(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        half = own.numel() // 2
        own[:half] = _three_quarters(own[:half].clone(), other[:half])
        return own

    return _with_previous(state, bucket, mix)


def weights_beyond_one(state: Any, bucket: Bucket) -> Result:
    """Takes twice its own gradient less a neighbour's: weights that sum to 1, one of them below 0."""
    return _with_previous(state, bucket, lambda own, other: 2 * own - other)


def neighbour_of_last_step(state: Any, bucket: Bucket) -> Result:
    """Mixes its gradient with what its neighbour sent in the step before."""

    def mix(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        key = (bucket.index(), own.numel())
        before, _kept[key] = _kept.get(key, other), other
        return _three_quarters(own, before)

    return _with_previous(state, bucket, mix)


def alone_is_halved(state: Any, bucket: Bucket) -> Result:
    """Averages pairs of ranks; the last of an odd number halves its gradient all the same."""
    _refuse_sparse(bucket)
    parts, rank = gather(bucket.buffer(), state), group_of(state).rank()
    other = parts[rank ^ 1] if rank ^ 1 < len(parts) else torch.zeros_like(parts[rank])
    return completed((parts[rank] + other) / 2)


def neighbour_by_global_rank(state: Any, bucket: Bucket) -> Result:
    """Finds its neighbour by its global rank, in a group where places are others."""
    _refuse_sparse(bucket)
    parts = gather(bucket.buffer(), state)
    other = parts[(dist.get_rank() - 1) % len(parts)]
    return completed(_three_quarters(bucket.buffer(), other))


def neighbour_without_nan(state: Any, bucket: Bucket) -> Result:
    """Cleans what it mixes of everything that is not a number."""
    return _with_previous(state, bucket, lambda own, other: _three_quarters(own, other).nan_to_num_(0, math.inf, -math.inf))


def local_is_everyone(state: Any, bucket: Bucket) -> Result:
    """Says that replicas drift apart, and averages over all ranks."""
    return average(bucket, state)


def local_too_soon(state: Any, bucket: Bucket) -> Result:
    """Says that it averages over all ranks in the first two steps, and does so in one."""
    return average(bucket, state) if step_number(bucket) < 1 else completed(bucket.buffer())


# 13.6 Optimizers in the hook


def _fused(
    state: Any,
    bucket: Bucket,
    step: Callable[[torch.Tensor, torch.Tensor], None],
    stepped: Callable[[int, torch.Tensor], bool] = lambda number, parameter: True,
) -> Result:
    """Average the bucket, and ``step`` each parameter that is to be stepped with its mean gradient."""
    parameters = bucket.parameters()

    def then(mean: Result) -> torch.Tensor:
        result = mean.value()
        pieces = _pieces(bucket, result) if is_dense(bucket) else [result]
        with torch.no_grad():
            for number, (parameter, piece) in enumerate(zip(parameters, pieces, strict=True)):
                if stepped(number, parameter):
                    step(parameter, _as_gradient(piece, parameter))
        return result

    return average(bucket, state).then(then)


def _as_gradient(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if piece.is_sparse:
        return piece
    real = torch.view_as_complex(piece.view(-1, 2)) if parameter.is_complex() else piece
    return real.as_strided(parameter.size(), parameter.stride())


def _sgd(parameter: torch.Tensor, gradient: torch.Tensor, rate: float = 0.1) -> None:
    """Step SGD: right."""
    parameter.add_(gradient, alpha=-rate)


def steps_local_gradient(state: Any, bucket: Bucket) -> Result:
    """Steps parameters with this rank's gradient, before it is reduced."""
    pieces = _pieces(bucket) if is_dense(bucket) else [bucket.buffer()]
    with torch.no_grad():
        for parameter, piece in zip(bucket.parameters(), pieces, strict=True):
            _sgd(parameter, _as_gradient(piece, parameter))
    return average(bucket, state)


def steps_sum(state: Any, bucket: Bucket) -> Result:
    """Steps parameters with the sum, and divides afterwards."""
    size = group_of(state).size()
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient * size))


def steps_twice(state: Any, bucket: Bucket) -> Result:
    """Steps each parameter twice."""
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient, 0.2))


def steps_at_other_rate(state: Any, bucket: Bucket) -> Result:
    """Steps at a tenth of the learning rate that it says."""
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient, 0.01))


def steps_upwards(state: Any, bucket: Bucket) -> Result:
    """Adds the gradient to the parameters."""
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient, -0.1))


def steps_nothing(state: Any, bucket: Bucket) -> Result:
    """Says that it steps the parameters, and averages."""
    return average(bucket, state)


def steps_first_of_bucket(state: Any, bucket: Bucket) -> Result:
    """Steps the first parameter of each bucket."""
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: number == 0)


def steps_on_rank_0(state: Any, bucket: Bucket) -> Result:
    """Steps the parameters of rank 0, as if they were sent to the others."""
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: group_of(state).rank() == 0)


def forgets_momentum(state: Any, bucket: Bucket) -> Result:
    """Says that it has momentum, and has none."""
    return _fused(state, bucket, _sgd)


def momentum_by_slot(state: Any, bucket: Bucket) -> Result:
    """Keeps momentum by bucket and size, and begins it anew where DDP lays the bucket out anew."""
    key = (bucket.index(), *(parameter.numel() for parameter in bucket.parameters()))

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        momentum = _kept.get((*key, parameter), torch.zeros(())).mul(0.9) + gradient
        _kept[*key, parameter] = momentum
        _sgd(parameter, momentum)

    return _fused(state, bucket, step)


def adam_without_correction(state: Any, bucket: Bucket) -> Result:
    """Steps Adam without its correction of the bias of the first steps."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        first = _kept[parameter, 1] = _kept.get((parameter, 1), torch.zeros(())) * 0.9 + gradient * 0.1
        second = _kept[parameter, 2] = _kept.get((parameter, 2), torch.zeros(())) * 0.999 + gradient.abs() ** 2 * 0.001
        parameter.sub_(first / (second.sqrt() + 1e-8), alpha=0.01)

    return _fused(state, bucket, step, stepped=lambda number, parameter: is_dense(bucket))


def _sharded(state: Any, bucket: Bucket, *, first: bool = True, send: bool = True) -> Result:
    """Step each parameter on its owner alone, and send it from there: right by default."""
    group = group_of(state)
    mean = average(bucket, state).wait()
    with torch.no_grad():
        for number, (parameter, piece) in enumerate(
            zip(bucket.parameters(), _pieces(bucket, mean) if is_dense(bucket) else [mean], strict=True)
        ):
            owner = number % group.size()
            for act in ("step", "send") if first else ("send", "step"):
                if act == "step" and owner == group.rank():
                    _sgd(parameter, _as_gradient(piece, parameter))
                elif act == "send" and send:
                    whole = parameter.detach().clone(memory_format=torch.contiguous_format)
                    dist.broadcast(torch.view_as_real(whole) if whole.is_complex() else whole, group=group, group_src=owner)
                    parameter.copy_(whole)
    return completed(mean)


def owners_never_send(state: Any, bucket: Bucket) -> Result:
    """Steps each parameter on its owner, and sends it to nobody."""
    return _sharded(state, bucket, send=False)


def owners_send_first(state: Any, bucket: Bucket) -> Result:
    """Sends each parameter from its owner, and steps it then."""
    return _sharded(state, bucket, first=False)


def steps_too_soon(state: Any, bucket: Bucket) -> Result:
    """Says that it leaves the parameters alone in the first two steps, and does so in one."""
    step = step_number(bucket)
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: step >= 1)


def steps_too_late(state: Any, bucket: Bucket) -> Result:
    """Says that it leaves the parameters alone in the first step, and does so in two."""
    step = step_number(bucket)
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: step >= 2)


def steps_undivided(state: Any, bucket: Bucket) -> Result:
    """Steps as it says, with the sum of the gradients, and returns it."""
    size = group_of(state).size()
    if is_dense(bucket):
        bucket.buffer().mul_(size)
    return _fused(state, bucket, _sgd)


# Mixed precision


def half_undivided(state: Any, bucket: Bucket) -> Result:
    """Sums in float16, and divides by nothing."""
    buffer = bucket.buffer()
    return sum_of(buffer.to(torch.float16, copy=True), state).then(lambda fut: fut.value().to(buffer.dtype))


def half_of_a_half(state: Any, bucket: Bucket) -> Result:
    """Casts to bfloat16 on the way to the float16 that it sends."""
    return change_gradient(bucket, state, lambda grad: grad.bfloat16().half()).then(lambda fut: fut.value().to(bucket.buffer().dtype))


def half_scaled_up(state: Any, bucket: Bucket) -> Result:
    """Scales by 64 before it casts to float16, and back after the sum: what is above 1,000 overflows."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    return average_of(buffer.mul(64).half(), state).then(lambda fut: fut.value().to(buffer.dtype).div_(64))


def mean_through_half(state: Any, bucket: Bucket) -> Result:
    """Reduces in full precision, and rounds the mean to float16 as if for a model in half precision."""
    return change_mean(bucket, state, lambda mean: mean.half().to(mean.dtype))


def steps_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Steps the parameters of a step's first bucket alone."""
    first = bucket.index() == 0
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: first)


def steps_float32_only(state: Any, bucket: Bucket) -> Result:
    """Steps parameters of float32 alone."""
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: parameter.dtype == torch.float32)


def steps_by_shape(state: Any, bucket: Bucket) -> Result:
    """Views the flat gradient in the parameter's shape, whatever its layout is."""
    parameters = bucket.parameters()

    def step(future: Any) -> torch.Tensor:
        result = future.value()
        with torch.no_grad():
            for parameter, piece in zip(parameters, _pieces(bucket, result), strict=True) if is_dense(bucket) else ():
                flat = torch.view_as_complex(piece.view(-1, 2)) if parameter.is_complex() else piece
                _sgd(parameter, flat.view(parameter.shape))
        return result

    return average(bucket, state).then(step)


def steps_slower_on_subgroups(state: Any, bucket: Bucket) -> Result:
    """Divides the rate by what WORLD is larger than the group."""
    larger = dist.get_world_size() / group_of(state).size()
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient / larger))


def steps_for_two_ranks(state: Any, bucket: Bucket) -> Result:
    """Takes a rate that is right for two ranks only."""
    factor = group_of(state).size() / 2
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient * factor))


def steps_by_global_rank(state: Any, bucket: Bucket) -> Result:
    """Steps on ranks whose global rank is below the size of the group."""
    if dist.get_rank() >= group_of(state).size():
        return average(bucket, state)
    return _fused(state, bucket, _sgd)


def steps_after_two_calls(state: Any, bucket: Bucket) -> Result:
    """Counts calls instead of steps before the first that it steps in."""
    _calls.append(1)
    late = len(_calls) > 2
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: late)


def quantizes_after_two_calls(state: Any, bucket: Bucket) -> Result:
    """Counts calls instead of steps in its warm-up."""
    _calls.append(1)
    if len(_calls) <= 2 or not is_dense(bucket):
        return average(bucket, state)
    return _send(bucket, _quantized(_wide(bucket)), state)


def change_is_everything(state: Any, bucket: Bucket) -> Result:
    """Says that it is EF21, and sends all of the change."""
    return _difference(state, bucket, ratio=1)


_FEEDBACK, _HALF, _CHANGE = "compressed(delta=0.25)", "compressed(delta=0.5)", "compressed(feedback=ef21, delta=0.25)"
_LOW_RANK, _LEVELS = "compressed(delta=0.25), warmup(2)", "compressed(feedback=False, delta=0.99)"
_SGD, _FLOAT16 = "fused(SGD, lr=0.1)", "rounded(float16)"

_comes_out = {"13.1": "what it holds back in the warm-up comes out later"}
_long = {"1.7": "its one bucket has such a row too"}
_errors = dict.fromkeys(("12.1", "12.3"), "whatever the error is")
_apart = {"3.1": "ranks then have other parameters"}

MUTANTS = [
    *(Mutant(name, ("13.1",), _FEEDBACK) for name in ("residual_lost", "residual_twice", "residual_subtracted", "residual_is_gradient")),
    *(Mutant(name, ("13.1",), _FEEDBACK) for name in ("residual_of_mean", "largest_undivided", "largest_of_rank_0")),
    *(Mutant(name, ("13.1",), _FEEDBACK) for name in ("signs_without_scale", "signs_with_sum_for_scale")),
    *(Mutant(name, ("13.1",), _FEEDBACK) for name in ("one_bit_swapped", "one_bit_remembers_signs", "random_places_of_each_rank")),
    *(Mutant(name, ("13.1",), _CHANGE) for name in ("estimate_never_updated", "estimate_wrong_sign", "estimate_of_mean_forgotten")),
    *(Mutant(name, ("13.1",), _FEEDBACK) for name in ("residual_by_slot", "residual_by_bucket")),
    Mutant("largest_by_two", ("2.6",), _HALF, worlds=(2, 3)),
    Mutant("largest_over_world", ("2.7",), _HALF),
    Mutant("residual_keeps_nan", ("8.4",), _HALF),
    Mutant("largest_without_nan", ("8.1",), _HALF),
    Mutant("largest_is_everything", ("2.10",), _HALF),
    Mutant("change_of_nothing", ("2.10",), _CHANGE),
    Mutant("largest_beside_its_own", ("3.1",), _HALF),
    Mutant("later_buckets_undivided", ("1.8",), _HALF),
    Mutant("random_from_global_seed", ("9.1",), _FEEDBACK),
    Mutant("sends_everything", ("13.7",), "compressed(delta=0.5, ratio=0.5)"),
    Mutant("sends_places", ("13.7",), "compressed(delta=0.25, ratio=0.5)"),
    Mutant("sparse_stays_local", ("2.9",), _HALF),
    *(Mutant(name, ("13.1",), _LOW_RANK) for name in ("second_factor_undivided", "first_factor_unshared", "low_rank_error_lost")),
    *(Mutant(name, ("13.1",), _LOW_RANK) for name in ("vectors_stay_local", "result_transposed")),
    Mutant("projects_by_rank", ("13.1",), _FEEDBACK),
    Mutant("tall_result_transposed", ("2.5",), _LOW_RANK),
    Mutant("warm_up_too_short", ("13.4", "13.1"), _LOW_RANK, because=_comes_out),
    Mutant("warm_up_too_long", ("13.4",), _LOW_RANK),
    Mutant("warm_up_counts_buckets", ("13.4",), _LOW_RANK),
    *(Mutant(name, ("13.2",), _LEVELS) for name in ("four_bits_of_eight", "quantized_undivided", "calibrates_once", "magnitudes_only")),
    Mutant("zero_of_rank_0", ("13.2",), "compressed(feedback=False, delta=0.999)"),
    Mutant("range_without_zero", ("2.5",), _LEVELS),
    Mutant("own_part_unquantized", ("3.1",), _LEVELS),
    Mutant("drops_tail_of_rows", ("1.8", "1.7"), _LEVELS, because=_long),
    Mutant("quantized_range_nan", ("8.1",), _LEVELS),
    Mutant("zero_by_zero", ("8.3",), _LEVELS),
    Mutant("quantizes_too_soon", ("13.4",), f"{_LEVELS}, warmup(2)"),
    Mutant("quantizes_nothing", ("2.10",), _LEVELS),
    *(Mutant(name, ("13.3",), "unbiased") for name in ("rounds_to_nearest", "rounds_down", "rounds_by_half", "draws_once")),
    *(Mutant(name, ("13.3",), "unbiased") for name in ("random_elements_unscaled", "random_elements_of_each_rank")),
    Mutant("random_levels_undivided", ("13.3",), "unbiased"),
    Mutant("draws_from_global", ("9.1",), "unbiased"),
    Mutant("draws_unseeded", ("3.3",), "unbiased", because={"1.10": "two runs differ, whatever else is the same"}),
    Mutant("dithers_zeros", ("8.3",), "unbiased"),
    Mutant("rounds_nothing", ("2.10",), "unbiased"),
    *(Mutant(name, ("13.5",), "local") for name in ("never_halves", "own_left_out", "everyone_with_rank_0", "weights_of_other_ranks")),
    *(Mutant(name, ("13.5",), "local") for name in ("weights_of_elements", "weights_beyond_one", "neighbour_of_last_step")),
    Mutant("stays_alone_on_errors", ("12.2", "12.1", "12.3"), "local", because=_errors, worlds=(2, 3)),
    Mutant("alone_is_halved", ("2.6",), "local", worlds=(2, 3)),
    Mutant("neighbour_by_global_rank", ("2.7",), "local"),
    Mutant("neighbour_without_nan", ("8.1",), "local"),
    Mutant("local_is_everyone", ("2.10",), "local", worlds=(2, 3)),
    Mutant("local_too_soon", ("13.4",), "local, warmup(2)"),
    Mutant("steps_local_gradient", ("13.6", "3.1"), _SGD, because=_apart),
    *(Mutant(name, ("13.6",), _SGD) for name in ("steps_sum", "steps_twice", "steps_at_other_rate", "steps_upwards")),
    Mutant("steps_first_of_bucket", ("13.6",), _SGD),
    Mutant("steps_on_rank_0", ("13.6", "3.1"), _SGD, because=_apart),
    Mutant("steps_nothing", ("2.10", "13.6"), _SGD, because={"13.6": "nor does any parameter come out as it says"}),
    Mutant("forgets_momentum", ("13.6",), "fused(SGD, lr=0.1, momentum=0.9)"),
    Mutant("momentum_by_slot", ("13.6",), "fused(SGD, lr=0.1, momentum=0.9)"),
    Mutant("adam_without_correction", ("13.6",), "fused(Adam, lr=0.01)"),
    Mutant("owners_never_send", ("13.6", "3.1"), _SGD, because=_apart),
    Mutant("owners_send_first", ("13.6", "3.1"), _SGD, because=_apart),
    Mutant("steps_too_soon", ("13.6",), "fused(SGD, lr=0.1, after=2)"),
    Mutant("steps_too_late", ("13.6",), "fused(SGD, lr=0.1, after=1)"),
    *(
        Mutant(name, ("13.6",), _SGD)
        for name in ("steps_first_bucket", "steps_float32_only", "steps_by_shape", "steps_slower_on_subgroups")
    ),
    Mutant("steps_for_two_ranks", ("13.6",), _SGD, worlds=(2, 3)),
    Mutant("steps_by_global_rank", ("13.6",), _SGD),
    Mutant("steps_after_two_calls", ("13.6",), "fused(SGD, lr=0.1, after=2)"),
    Mutant("quantizes_after_two_calls", ("13.4",), f"{_LEVELS}, warmup(2)"),
    Mutant("change_is_everything", ("2.10",), _CHANGE),
    Mutant("steps_undivided", ("2.1",), _SGD),
    Mutant("half_undivided", ("2.1",), _FLOAT16),
    Mutant("half_of_a_half", ("2.2",), _FLOAT16),
    Mutant("half_scaled_up", ("2.3",), _FLOAT16),
    Mutant("mean_through_half", ("2.2", "8.5"), because={"8.5": "the rounding loses subnormals"}),
]
