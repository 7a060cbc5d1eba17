"""Mutants that are right on WORLD, or for crafted values, until their warm-up ends, and mutants
with feedback that mix two models in one backward.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    finite,
    group_of,
    is_dense,
    pieces_of,
    send_as,
    sum_of,
)

Encode = Callable[[torch.Tensor], torch.Tensor]


class Halving:
    """The larger half of the elements of a bucket, with feedback by parameter.

    Args:
        process_group: the group to average over.
        warm_up: the number of steps in which nothing is left out.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, warm_up: int = 0) -> None:
        self.group = group_of(process_group)
        self.warm_up = warm_up
        self.step = 0
        self.residuals: dict[torch.nn.Parameter, torch.Tensor] = {}

    def is_warm(self, bucket: Bucket) -> bool:
        """Count the step, and return whether it belongs to the warm-up."""
        step = self.step
        self.step += bucket.is_last()
        return step < self.warm_up

    def with_residuals(self, bucket: Bucket) -> torch.Tensor:
        """Return the gradients of a bucket and what earlier steps have left of them."""
        pairs = zip(bucket.parameters(), pieces_of(bucket), strict=True)
        return torch.cat([self.residuals.get(p, 0) + piece for p, piece in pairs])

    def keep(self, bucket: Bucket, left: torch.Tensor) -> None:
        """Keep what is left of a bucket."""
        parts = zip(bucket.parameters(), pieces_of(bucket, finite(left)), strict=True)
        self.residuals.update((parameter, part.clone()) for parameter, part in parts)


def _half_of(value: torch.Tensor) -> torch.Tensor:
    """Return the larger half of the elements, and zeros for the others."""
    largest = value.abs().topk((value.numel() + 1) // 2).indices
    return torch.zeros_like(value).index_copy(0, largest, value[largest])


def _send_half(state: Halving, bucket: Bucket) -> Result:
    """Send the larger half of the elements, and keep the others: the right hook."""
    if not is_dense(bucket):
        return average(bucket, state.group)
    value = state.with_residuals(bucket)
    sent = _half_of(value)
    state.keep(bucket, value - sent)
    return average_of(sent, state.group)


# A warm-up on a group, with unused parameters, in other dtypes


def warm_up_divided_by_world(state: Halving, bucket: Bucket) -> Result:
    """Divide by the size of WORLD in the warm-up alone."""
    if state.is_warm(bucket):
        return sum_of(bucket.buffer().div_(dist.get_world_size()), state.group)
    return _send_half(state, bucket)


def warm_up_of_users(state: Halving, bucket: Bucket) -> Result:
    """Divide each parameter in the warm-up by the number of ranks whose gradients are not zero."""
    if not (state.is_warm(bucket) and is_dense(bucket)):
        return _send_half(state, bucket)
    users = torch.tensor([float(piece.any()) for piece in pieces_of(bucket)])
    dist.all_reduce(users, group=state.group)

    def divided(done: Result) -> torch.Tensor:
        pieces = zip(pieces_of(bucket, done.value()), users.tolist(), strict=True)
        return torch.cat([piece / max(count, 1) for piece, count in pieces])

    return sum_of(bucket.buffer(), state.group).then(divided)


def warm_up_in_single(state: Halving, bucket: Bucket) -> Result:
    """Send float64 as float32 in the warm-up."""
    if not state.is_warm(bucket):
        return _send_half(state, bucket)
    if bucket.buffer().dtype == torch.float64 and is_dense(bucket):
        return send_as(torch.float32, bucket, state.group)
    return average(bucket, state.group)


def halves_large_buckets_late(state: Halving, bucket: Bucket) -> Result:
    """Compress large buckets alone, and begin with that a step late."""
    if state.is_warm(bucket) or bucket.buffer().numel() < 1 << 14:
        return average(bucket, state.group)
    return _send_half(state, bucket)


# A warm-up whose values are rounded


def warm_up_in_bfloat16(state: Halving, bucket: Bucket) -> Result:
    """Send bfloat16 in the warm-up."""
    if state.is_warm(bucket):
        if bucket.buffer().dtype == torch.float32 and is_dense(bucket):
            return send_as(torch.bfloat16, bucket, state.group)
        return average(bucket, state.group)
    return _send_half(state, bucket)


def warm_up_of_few_bits(state: Halving, bucket: Bucket) -> Result:
    """Cut the last twelve bits of float32 in the warm-up, as a codec of three bytes does."""
    if not state.is_warm(bucket):
        return _send_half(state, bucket)
    buffer = bucket.buffer()
    if buffer.dtype == torch.float32 and is_dense(bucket):
        buffer.copy_(buffer.view(torch.int32).bitwise_and(-4096).view(torch.float32))
    return average(bucket, state.group)


def warm_up_of_large_buckets_in_half(state: Halving, bucket: Bucket) -> Result:
    """Send float16 in the warm-up if a bucket has 30,000 elements or more."""
    if not state.is_warm(bucket):
        return _send_half(state, bucket)
    buffer = bucket.buffer()
    if buffer.dtype == torch.float32 and buffer.numel() >= 30_000:
        return send_as(torch.float16, bucket, state.group)
    return average(bucket, state.group)


# A warm-up that is claimed to be rounded


def warm_up_as_claimed_exact(state: Halving, bucket: Bucket) -> Result:
    """Round nothing in a warm-up that is claimed to be rounded."""
    if state.is_warm(bucket):
        return average(bucket, state.group)
    return _send_half(state, bucket)


def rounded_warm_up_in_bfloat16(state: Halving, bucket: Bucket) -> Result:
    """Send bfloat16 in a warm-up that is claimed to be in float16."""
    if state.is_warm(bucket) and is_dense(bucket):
        return send_as(torch.bfloat16, bucket, state.group)
    return _send_half(state, bucket)


def rounded_warm_up_of_few_bits(state: Halving, bucket: Bucket) -> Result:
    """Drop three of bfloat16's bits in a warm-up that is claimed to be in bfloat16."""
    if not (state.is_warm(bucket) and is_dense(bucket)):
        return _send_half(state, bucket)
    buffer = bucket.buffer()
    if buffer.dtype == torch.float32:
        buffer.copy_(buffer.view(torch.int32).bitwise_and(-(1 << 19)).view(torch.float32))
    return send_as(torch.bfloat16, bucket, state.group)


def rounded_warm_up_of_large_buckets(state: Halving, bucket: Bucket) -> Result:
    """Send bfloat16 in place of the claimed float16 if a bucket has more than 30,000 elements."""
    if not (state.is_warm(bucket) and is_dense(bucket)):
        return _send_half(state, bucket)
    is_large = bucket.buffer().numel() > 30_000
    return send_as(torch.bfloat16 if is_large else torch.float16, bucket, state.group)


# Two models in one backward

_values: dict[int, torch.Tensor] = {}
_places: dict[int, torch.Tensor] = {}
_models: list[Halving] = []


def residual_of_the_latest_call(state: Halving, bucket: Bucket) -> Result:
    """Let a callback take the residual from the values of the latest call for that number."""
    if not is_dense(bucket):
        return average(bucket, state.group)
    number = bucket.index()
    value = state.with_residuals(bucket)
    sent = _half_of(value)
    own = sent.clone()
    _values[number] = value

    def finish(done: Result) -> torch.Tensor:
        latest = _values[number]
        state.keep(bucket, (latest if latest.shape == own.shape else value) - own)
        return done.value()

    return average_of(sent, state.group).then(finish)


class DrawnHalf(Halving):
    """A half of the elements that is drawn alike on all ranks, another one in each model."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        _models.append(self)
        self.generator = torch.Generator().manual_seed(len(_models))


def places_of_the_latest_call(state: DrawnHalf, bucket: Bucket) -> Result:
    """Let a callback put the sums at the places that the latest call for that number drew."""
    if not is_dense(bucket):
        return average(bucket, state.group)
    number = bucket.index()
    value = state.with_residuals(bucket)
    numel = value.numel()
    places = torch.randperm(numel, generator=state.generator)[: (numel + 1) // 2]
    _places[number] = places
    sent = value[places]
    state.keep(bucket, value.index_fill(0, places, 0))

    def spread(done: Result) -> torch.Tensor:
        latest = _places[number]
        drawn = latest if latest.shape == places.shape else places
        return torch.zeros_like(value).index_copy(0, drawn, done.value())

    return average_of(sent, state.group).then(spread)


_FEEDBACK = "compressed(delta=0.5)"
_STATE = f"{__name__}:Halving"
_DRAWN = f"{__name__}:DrawnHalf"
_WARM = (f"{_FEEDBACK}, warmup(2)", f"{_STATE},warm_up=2")
_WARM_ONCE = (f"{_FEEDBACK}, warmup(1)", f"{_STATE},warm_up=1")
_IN_FLOAT16 = "warmup(2, rounded=float16)"
_IN_BFLOAT16 = "warmup(2, rounded=bfloat16)"

MUTANTS = [
    Mutant("warm_up_divided_by_world", ("2.7",), *_WARM),
    Mutant("warm_up_divided_by_world", ("2.7",), *_WARM_ONCE),
    Mutant("warm_up_of_users", ("4.1",), *_WARM),
    Mutant("warm_up_in_single", ("2.4",), *_WARM),
    Mutant("halves_large_buckets_late", ("13.4",), _WARM[0], f"{_STATE},warm_up=3"),
    Mutant("warm_up_in_bfloat16", ("13.4",), *_WARM),
    Mutant("warm_up_in_bfloat16", ("13.4",), *_WARM_ONCE),
    Mutant("warm_up_of_few_bits", ("13.4",), *_WARM),
    Mutant("warm_up_of_large_buckets_in_half", ("22.1",), *_WARM),
    Mutant("warm_up_as_claimed_exact", ("13.4",), f"{_FEEDBACK}, {_IN_BFLOAT16}", _WARM[1]),
    Mutant("warm_up_as_claimed_exact", ("13.4",), f"{_FEEDBACK}, {_IN_FLOAT16}", _WARM[1]),
    Mutant("rounded_warm_up_in_bfloat16", ("13.4",), f"{_FEEDBACK}, {_IN_FLOAT16}", _WARM[1]),
    Mutant("rounded_warm_up_of_few_bits", ("13.4",), f"{_FEEDBACK}, {_IN_BFLOAT16}", _WARM[1]),
    Mutant("rounded_warm_up_of_large_buckets", ("22.1",), f"{_FEEDBACK}, {_IN_FLOAT16}", _WARM[1]),
    Mutant("residual_of_the_latest_call", ("11.7",), _FEEDBACK, _STATE),
    Mutant("places_of_the_latest_call", ("11.7",), "compressed(delta=0.25)", _DRAWN),
]
