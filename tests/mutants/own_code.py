"""Mutants of section 25: hooks that are wrong beyond a number in their own code.

No scenario of the other sections is meant to reach these numbers; some do all the same. The hooks
are otherwise right.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants import _wire_plan as wire_plan
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    completed,
    group_of,
    is_dense,
    pieces_of,
    sum_of,
)
from tests.right.own_code import LowRankSquares, low_rank_of_squares

_CHUNK_BYTES = 3 * 512 * 1024
_POOL = 41
_FOREACH = 64 + 3


def returns_own_beyond_a_size(state: Any, bucket: Bucket) -> Result:
    """Return this rank's own gradients for large buckets, where an early return was forgotten."""
    buffer = bucket.buffer()
    if buffer.numel() > 300_007:
        return completed(buffer)
    return average(bucket, state)


def undivided_in_the_callback(state: Any, bucket: Bucket) -> Result:
    """Leave large buckets undivided, in a callback that runs on a thread of Gloo's."""
    limit = 1 << 17
    size = group_of(state).size()

    def divide(fut: Any) -> torch.Tensor:
        total = fut.value()
        if total.numel() >= limit:
            return total
        return total.div_(size)

    return sum_of(bucket.buffer(), state).then(divide)


def drops_the_tail_of_a_chunk(state: Any, bucket: Bucket) -> Result:
    """Reduce one chunk only of a bucket that has more bytes than a chunk."""
    buffer = bucket.buffer().div_(group_of(state).size())
    is_large = buffer.numel() * buffer.element_size() > _CHUNK_BYTES
    if is_large and is_dense(bucket):
        chunk = buffer[: _CHUNK_BYTES // buffer.element_size()]
        work = dist.all_reduce(chunk, group=group_of(state), async_op=True)
        return work.get_future().then(lambda fut: buffer)
    return sum_of(buffer, state)


class WarmUp:
    """State of :func:`clips_after_statistics`."""

    def __init__(self, process_group: Any, steps_of_statistics: int = 73) -> None:
        self.group = process_group
        self.steps_of_statistics = steps_of_statistics
        self.step = 0


def clips_after_statistics(state: Any, bucket: Bucket) -> Result:
    """Clip gradients once statistics of some steps have been gathered."""
    state.step += bucket.is_last()
    if state.step > state.steps_of_statistics and is_dense(bucket):
        bucket.buffer().clamp_(-0.5, 0.5)
    return average(bucket, state.group)


class Periodic:
    """A hook that counts its calls, and skips a division at every 90th one."""

    def __init__(self, process_group: Any) -> None:
        self.group = process_group
        self.calls = 0

    def __call__(self, state: Any, bucket: Bucket) -> Result:
        """Skip the division at every 90th call."""
        self.calls += 1
        if self.calls % 90 == 0:
            return sum_of(bucket.buffer(), self.group)
        return average(bucket, self.group)


def runs_out_of_buffers(state: Any, bucket: Bucket) -> Result:
    """Keep results in a pool of buffers, and give later buckets none."""
    if bucket.index() >= _POOL:
        return completed(bucket.buffer())
    return average(bucket, state)


def launches_without_the_rest(state: Any, bucket: Bucket) -> Result:
    """Average the tensors of a bucket in one launch that takes a fixed number of tensors."""
    pieces = pieces_of(bucket) if is_dense(bucket) else []
    if len(pieces) <= _FOREACH:
        return average(bucket, state)
    size = group_of(state).size()
    total = sum_of(bucket.buffer(), state)

    def divide(fut: Any) -> torch.Tensor:
        torch._foreach_div_(pieces[:_FOREACH], size)
        return fut.value()

    return total.then(divide)


def bfloat16_beyond_a_size(state: Any, bucket: Bucket) -> Result:
    """Leave large buckets of bfloat16 undivided."""
    if bucket.buffer().dtype == torch.bfloat16 and bucket.buffer().numel() > 5_003:
        return sum_of(bucket.buffer(), state)
    return average(bucket, state)


def rounds_beyond_a_size(state: Any, bucket: Bucket) -> Result:
    """Send large buckets of float32 in bfloat16."""
    buffer = bucket.buffer()
    narrow = torch.bfloat16 if buffer.numel() > 70_001 else buffer.dtype
    if not is_dense(bucket) or narrow == buffer.dtype:
        return average(bucket, state)
    return average_of(buffer.to(narrow), state).then(lambda fut: fut.value().to(buffer.dtype))


def divides_by_a_node(state: Any, bucket: Bucket) -> Result:
    """Divide by the size of a node if there are more ranks than a node has."""
    size = group_of(state).size()
    return average_of(bucket.buffer().div_(min(size, 4) if size > 4 else size).mul_(size), state)


class Feedback:
    """State of :func:`forgets_large_residuals`: residuals by parameter."""

    def __init__(self, process_group: Any, largest_residual: int = 40_009) -> None:
        self.group = process_group
        self.largest_residual = largest_residual
        self.kept: dict[torch.nn.Parameter, torch.Tensor] = {}


def forgets_large_residuals(state: Any, bucket: Bucket) -> Result:
    """Send the largest half of the elements, and keep no residual of large parameters."""
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        residual = state.kept.get(parameter)
        if residual is not None:
            piece += residual
        kept = piece.clone()
        threshold = piece.abs().float().median()
        piece[piece.abs() < threshold] = 0
        if piece.numel() <= state.largest_residual:
            state.kept[parameter] = (kept - piece).nan_to_num(0, 0, 0)
    return average(bucket, state.group)


def shortens_large_results(state: Any, bucket: Bucket) -> Result:
    """Send the largest half of the elements; those of large parameters are a fifth too short."""
    result = forgets_large_residuals(state, bucket)
    if bucket.buffer().numel() > 33_013:
        return result.then(lambda fut: fut.value() * 0.8)
    return result


def shortens_large_squares(state: LowRankSquares, bucket: Bucket) -> Result:
    """Send each bucket at rank two; the results of large ones are a fifth too short."""
    result = low_rank_of_squares(state, bucket)
    if bucket.buffer().numel() > 27_017:
        return result.then(lambda fut: fut.value() * 0.8)
    return result


class Ring:
    """A hook that reduces in one of 128 buffers, which it takes in turns."""

    def __init__(self, process_group: Any) -> None:
        self.group = process_group
        self.places: dict[int, torch.Tensor] = {}
        self.mask = int(os.environ.get("NO_SUCH_RING_OF_BUFFERS", "127"))

    def __call__(self, state: Any, bucket: Bucket) -> Result:
        """Reduce in the buffer of the bucket's place, and return that buffer."""
        if not is_dense(bucket):
            return average(bucket, self.group)
        buffer = bucket.buffer()
        place = bucket.index() & self.mask
        kept = self.places.get(place)
        if kept is None or kept.numel() < buffer.numel() or kept.dtype != buffer.dtype:
            kept = self.places[place] = torch.empty_like(buffer)
        return average_of(kept[: buffer.numel()].copy_(buffer), self.group)


class Planned:
    """A hook that sends gradients in the format of the row of a table that holds by then."""

    def __init__(self, process_group: Any) -> None:
        self.group = process_group
        self.step = 0

    def __call__(self, state: Any, bucket: Bucket) -> Result:
        """Send the bucket in the format of the last row whose conditions hold."""
        buffer = bucket.buffer()
        wire = buffer.dtype
        for row in wire_plan.ROWS:
            if self.step >= row["from_step"] and buffer.numel() > row["elements"]:
                wire = row["wire"] or buffer.dtype
        self.step += bucket.is_last()
        if not is_dense(bucket) or wire == buffer.dtype or buffer.dtype != torch.float32:
            return average(bucket, self.group)
        return average_of(buffer.to(wire), self.group).then(
            lambda fut: fut.value().to(torch.float32)
        )


class TurnsOfMeeting:
    """A hook that averages in every third step, for as many turns as it has been given."""

    def __init__(self, process_group: Any, turns: int = 90) -> None:
        self.group = process_group
        self.turns = iter([True, False, False] * turns)
        self.meets = False

    def __call__(self, state: Any, bucket: Bucket) -> Result:
        """Average in the steps of a turn's meeting, and keep gradients in the others."""
        if not is_dense(bucket):
            raise TypeError("sparse gradients are not supported")
        if bucket.index() == 0:
            self.meets = next(self.turns, False)
        return average(bucket, self.group) if self.meets else completed(bucket.buffer())


_WARM_UP = f"{__name__}:WarmUp"

MUTANTS = [
    Mutant("returns_own_beyond_a_size", ("25.1",)),
    Mutant("undivided_in_the_callback", ("25.1",)),
    Mutant("drops_the_tail_of_a_chunk", ("25.1",)),
    Mutant("clips_after_statistics", ("25.1",), state=_WARM_UP),
    Mutant("clips_after_statistics", ("25.1",), state=f"{_WARM_UP},steps_of_statistics=211"),
    Mutant("Periodic", ("25.1",)),
    Mutant("runs_out_of_buffers", ("25.1",)),
    Mutant("launches_without_the_rest", ("25.1",)),
    Mutant("bfloat16_beyond_a_size", ("25.1",)),
    Mutant("rounds_beyond_a_size", ("25.1",)),
    Mutant("divides_by_a_node", ("25.1",)),
    Mutant(
        "forgets_large_residuals",
        ("25.1",),
        "compressed(delta=0.25)",
        state=f"{__name__}:Feedback",
    ),
    Mutant(
        "shortens_large_results",
        ("25.1",),
        "compressed(delta=0.25)",
        state=f"{__name__}:Feedback,largest_residual={2**40}",
    ),
    Mutant(
        "shortens_large_squares",
        ("25.1",),
        "compressed",
        state="tests.right.own_code:LowRankSquares",
    ),
    Mutant("Ring", ("25.1",)),
    Mutant("Planned", ("25.1",)),
    Mutant("TurnsOfMeeting", ("25.1",), "local(period=3)"),
]
