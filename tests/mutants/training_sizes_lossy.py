"""Broken lossy subjects for section 22: right at small sizes, wrong beyond a threshold."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average_of,
    completed,
    finite,
    group_of,
    is_dense,
    kept,
    pieces_of,
    seeded,
    step_number,
    sum_of,
)

Hook = Callable[[Any, Bucket], Result]


def _half(part: torch.Tensor) -> torch.Tensor:
    """Keep the larger half of the elements, by magnitude."""
    least = part.abs().median()
    return torch.where(part.abs() >= least, part, 0)


def _with_feedback(bucket: Bucket, compress: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the bucket's gradients by compressed ones, and keep what is left out."""
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        if parameter in kept:
            piece.add_(kept[parameter])
        sent = compress(piece)
        kept[parameter] = finite(piece - sent)
        piece.copy_(sent)


def _undivided(tensor: torch.Tensor, state: Any) -> Result:
    return sum_of(tensor, state)


def _fifteen_times(tensor: torch.Tensor, state: Any) -> Result:
    return average_of(tensor.mul_(15), state)


def _own(tensor: torch.Tensor, state: Any) -> Result:
    return completed(tensor)


def _zeros(tensor: torch.Tensor, state: Any) -> Result:
    return completed(torch.zeros_like(tensor))


def _without_tail(tensor: torch.Tensor, state: Any) -> Result:
    tensor[len(tensor) * 31 // 32 :] = 0
    return average_of(tensor, state)


def _without_fifth(tensor: torch.Tensor, state: Any) -> Result:
    tensor[len(tensor) * 4 // 5 :] = 0
    return average_of(tensor, state)


def _places_in_20_bits(tensor: torch.Tensor, state: Any) -> Result:
    """Place the sent values at indices of which the lower 20 bits are left."""
    places = torch.arange(len(tensor)).bitwise_and_((1 << 20) - 1)
    return average_of(torch.zeros_like(tensor).index_add_(0, places, tensor), state)


def _places_in_float32(tensor: torch.Tensor, state: Any) -> Result:
    """Place the sent values at indices that went through float32: odd ones above 2**24 move."""
    places = tensor.nonzero().flatten()
    moved = places.float().long().clamp(max=len(tensor) - 1)
    placed = torch.zeros_like(tensor).index_add_(0, moved, tensor[places])
    return average_of(placed, state)


_REDUCTIONS: dict[str, Callable[[torch.Tensor, Any], Result]] = {
    "undivided": _undivided,
    "fifteen_times": _fifteen_times,
    "own": _own,
    "zeros": _zeros,
    "without_tail": _without_tail,
    "without_fifth": _without_fifth,
    "places_in_20_bits": _places_in_20_bits,
    "places_in_float32": _places_in_float32,
}


def feedback_above(numel: int, defect: str) -> Hook:
    """Compress with feedback, but reduce buckets of more than ``numel`` elements wrongly."""

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = bucket.buffer()
        if not is_dense(bucket):
            return average_of(buffer, state)
        _with_feedback(bucket, _half)
        return (_REDUCTIONS[defect] if len(buffer) > numel else average_of)(buffer, state)

    return hook


def largest_only_above(numel: int) -> Hook:
    """Compress with feedback, which parameters of more than ``numel`` elements lose."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if is_dense(bucket):
            _with_feedback(bucket, _half)
            for parameter in bucket.parameters():
                if parameter.numel() > numel:
                    del kept[parameter]
        return average_of(bucket.buffer(), state)

    return hook


def whole_chunks_above(numel: int, chunk: int) -> Hook:
    """Return a hook that sorts a large parameter in chunks, and sends nothing of the last one if it
    is shorter.
    """

    def compress(part: torch.Tensor) -> torch.Tensor:
        if len(part) <= numel:
            return _half(part)
        sent = torch.zeros_like(part)
        whole = len(part) // chunk * chunk
        for begin in range(0, whole, chunk):
            sent[begin : begin + chunk] = _half(part[begin : begin + chunk])
        return sent

    def hook(state: Any, bucket: Bucket) -> Result:
        if is_dense(bucket):
            _with_feedback(bucket, compress)
        return average_of(bucket.buffer(), state)

    return hook


def no_last_block(numel: int, block: int) -> Hook:
    """Return a hook with values rounded at random, of whole blocks alone in large parameters."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            raise TypeError("sparse gradients are not supported")
        draw = seeded(step_number(bucket), group_of(state).rank(), bucket.index())
        for part in pieces_of(bucket):
            keeps = torch.rand(len(part), generator=draw) < 0.5
            part.mul_(2 * keeps.to(part.dtype))
            if len(part) > numel:
                part[len(part) // block * block :] = 0
        return average_of(bucket.buffer(), state)

    return hook


def rounded_at_random_above(numel: int, defect: str) -> Hook:
    """Send sixteenths rounded at random, but reduce larger buckets wrongly."""

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = bucket.buffer()
        step = step_number(bucket)
        if not is_dense(bucket):
            return average_of(buffer, state)
        draw = seeded(step, bucket.index(), dist.get_rank(group_of(state)))
        noise = torch.rand(len(buffer), generator=draw)
        scale = buffer.abs().max().clamp(min=1e-30) / 16
        buffer.copy_((buffer / scale + noise.to(buffer.dtype)).floor_().mul_(scale))
        return (_REDUCTIONS[defect] if len(buffer) > numel else average_of)(buffer, state)

    return hook


def few_bits_above(numel: int, defect: str) -> Hook:
    """Round to 1/64 of the largest, without feedback, but reduce larger buckets wrongly."""

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = bucket.buffer()
        if not is_dense(bucket):
            return average_of(buffer, state)
        scale = buffer.abs().max().clamp(min=1e-30) / 64
        buffer.copy_((buffer / scale).round_().mul_(scale))
        return (_REDUCTIONS[defect] if len(buffer) > numel else average_of)(buffer, state)

    return hook


def pairs_above(numel: int, defect: str) -> Hook:
    """Keep three quarters of the own gradient and a quarter of the partner's, in small buckets."""

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = bucket.buffer()
        if not is_dense(bucket):
            return average_of(buffer, state)
        if len(buffer) > numel:
            return _LOCAL[defect](buffer, state)
        # Three quarters of its own, and a quarter of the mean of all: weights sum to 1.
        own = buffer.clone()
        return average_of(buffer, state).then(
            lambda fut: fut.value().mul_(0.25).add_(own, alpha=0.75)
        )

    return hook


def _half_local(tensor: torch.Tensor, state: Any) -> Result:
    own = tensor.clone()
    half = len(tensor) // 2

    def mix(fut: Result) -> torch.Tensor:
        mixed = fut.value().mul_(0.25).add_(own, alpha=0.75)
        mixed[half:] = own[half:]
        return mixed

    return average_of(tensor, state).then(mix)


def _too_much(tensor: torch.Tensor, state: Any) -> Result:
    own = tensor.clone()
    return average_of(tensor, state).then(lambda fut: fut.value().mul_(0.3).add_(own, alpha=0.75))


_LOCAL = {"half_is_own": _half_local, "too_much": _too_much, "zeros": _zeros}

FEEDBACK = "compressed(delta=0.25)"


def _of_network(numel: int, defect: str, breaks: str = "22.1") -> Mutant:
    return Mutant(f"feedback_above,numel={numel},defect={defect}", (breaks,), FEEDBACK)


def noise_in_front(numel: int) -> Hook:
    """Return a hook with noise for so many elements of a bucket, as a pool of noise has them."""
    return _noise_hook(numel, lambda wire, pool: wire[: len(pool)].add_(pool))


def noise_in_few_blocks(numel: int) -> Hook:
    """Return a hook with noise for blocks of a bucket that lie four blocks apart."""

    def add(wire: torch.Tensor, pool: torch.Tensor) -> None:
        if len(wire) <= numel:
            wire.add_(pool)
            return
        for begin in range(0, len(wire) - numel, 4 * numel):
            wire[begin : begin + numel].add_(pool)

    return _noise_hook(numel, add)


def _noise_hook(numel: int, add: Callable[[torch.Tensor, torch.Tensor], object]) -> Hook:
    def hook(state: Any, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            raise TypeError("sparse gradients are not supported")
        draw = seeded(step_number(bucket), group_of(state).rank(), bucket.index())
        wire = bucket.buffer().clone()
        pool = torch.randn(min(numel, len(wire)), generator=draw)
        add(wire, pool.mul_(0.5).to(wire.dtype))
        return average_of(wire, state)

    return hook


def _vast(numel: int, defect: str) -> Mutant:
    return Mutant(f"feedback_above,numel={numel},defect={defect}", ("22.4",), FEEDBACK)


MUTANTS = (
    _of_network(53_021, "without_tail"),
    _of_network(91_307, "zeros"),
    _of_network(70_001, "own", "2.5"),
    Mutant("largest_only_above,numel=40_000", ("22.1",), FEEDBACK),
    _vast(9_123_456, "undivided"),
    _vast(3_456_789, "own"),
    _vast(12_345_678, "zeros"),
    _vast(16_777_216, "places_in_float32"),
    Mutant("rounded_at_random_above,numel=30_011,defect=undivided", ("22.1",), "unbiased"),
    Mutant("rounded_at_random_above,numel=41_017,defect=without_tail", ("22.1",), "unbiased"),
    *(
        Mutant(f"rounded_at_random_above,numel={numel},defect={defect}", ("22.2",), "unbiased")
        for numel, defect in (
            (1_234_567, "undivided"),
            (1_500_011, "own"),
            (2_345_678, "without_fifth"),
            (2_000_000, "places_in_20_bits"),
        )
    ),
    Mutant(
        "few_bits_above,numel=900_001,defect=own",
        ("2.5",),
        "compressed(feedback=False, delta=0.99)",
    ),
    Mutant(
        "few_bits_above,numel=7_654_321,defect=undivided",
        ("22.4",),
        "compressed(feedback=False, delta=0.99)",
    ),
    *(
        Mutant(f"whole_chunks_above,numel={numel},chunk={chunk}", ("22.4",), FEEDBACK)
        for numel, chunk in ((1_048_576, 65_536), (2_000_000, 30_000))
    ),
    Mutant("no_last_block,numel=1_500_000,block=10_000", ("22.4",), "unbiased"),
    *(
        Mutant(name, ("22.4",), "unbiased(noise=0.5)")
        for name in ("noise_in_front,numel=65_536", "noise_in_front,numel=1_000_000")
    ),
    Mutant("noise_in_few_blocks,numel=200_000", ("22.4",), "unbiased(noise=0.5)"),
    Mutant("pairs_above,numel=1_500_007,defect=half_is_own", ("22.1",), "local"),
    Mutant("pairs_above,numel=5_000_011,defect=too_much", ("22.1",), "local"),
)
