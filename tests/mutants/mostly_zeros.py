"""Mutants that send places and values of gradients that are mostly zeros (rules 2.12, 8.7 and
24.4).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    completed,
    gather,
    group_of,
    is_dense,
    send_as,
)

Hook = Callable[[Any, Bucket], Result]


def _counts(places: torch.Tensor, state: Any, op: dist.ReduceOp.RedOpType) -> int:
    """Return the sum or the maximum of the ranks' numbers of places."""
    count = torch.tensor([len(places)])
    dist.all_reduce(count, op=op, group=group_of(state))
    return int(count)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor))])


def _takes_lists(bucket: Bucket) -> bool:
    return is_dense(bucket) and not bucket.buffer().is_complex()


def room_for_the_mean(parts: int, least: int = 0) -> Hook:
    """Send lists if ranks have on average no more places than a part of the buffer has elements;
    a rank with more places loses the rest. Smaller buffers than ``least`` are sent whole.
    """

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = bucket.buffer()
        size = group_of(state).size()
        if not _takes_lists(bucket) or buffer.numel() < max(least, parts):
            return average(bucket, state)
        room = buffer.numel() // parts
        places = buffer.nonzero().squeeze(1)
        if _counts(places, state, dist.ReduceOp.SUM) > room * size:
            return average(bucket, state)
        places = places[:room]
        values = _padded(buffer[places] / size, room)
        total = torch.zeros_like(buffer)
        every_place = gather(_padded(places, room), state)
        for at, part in zip(every_place, gather(values, state), strict=True):
            total.index_add_(0, at, part)
        return completed(total)

    return hook


def _listed(
    state: Any, bucket: Bucket, narrow: Callable[[torch.Tensor], torch.Tensor], adds: bool
) -> torch.Tensor | None:
    """Return the mean of lists as long as the longest one; None if one is longer than a quarter of
    the buffer.

    Args:
        state: the state of the hook.
        bucket: the bucket.
        narrow: returns the places that are sent.
        adds: values are added to the sum; otherwise each list is written to a buffer of its own.
    """
    buffer = bucket.buffer()
    size = group_of(state).size()
    places = buffer.nonzero().squeeze(1)
    most = _counts(places, state, dist.ReduceOp.MAX)
    if 4 * most > buffer.numel():
        return None
    total = torch.zeros_like(buffer)
    if not most:
        return total
    values = gather(_padded(buffer[places] / size, most), state)
    for at, part in zip(gather(narrow(_padded(places, most)), state), values, strict=True):
        if adds:
            total.index_add_(0, at, part)
            continue
        own = torch.zeros_like(buffer)
        for place, value in zip(at.tolist(), part, strict=True):
            own[place] = value
        total += own
    return total


def places_in_16_bits(state: Any, bucket: Bucket) -> Result:
    """Send places modulo 2**16."""
    if not _takes_lists(bucket):
        return average(bucket, state)
    mean = _listed(state, bucket, lambda places: places % 2**16, adds=True)
    return average(bucket, state) if mean is None else completed(mean)


def padding_overwrites(state: Any, bucket: Bucket) -> Result:
    """Fill short lists up with zeros for the first place, and write them in place of its value."""
    if not _takes_lists(bucket):
        return send_as(torch.float16, bucket, state)
    mean = _listed(state, bucket, lambda places: places, adds=False)
    return send_as(torch.float16, bucket, state) if mean is None else completed(mean)


def _embedding_of(bucket: Bucket) -> torch.Tensor | None:
    """Return the gradient of an embedding that has a bucket of its own."""
    gradients = bucket.gradients() if _takes_lists(bucket) else []
    if len(gradients) != 1 or gradients[0].dim() != 2 or len(gradients[0]) < 16:
        return None
    return gradients[0]


def rows_by_their_sum(state: Any, bucket: Bucket) -> Result:
    """Send the rows whose elements do not sum to zero on some rank, as DeepSpeed's SparseTensor
    selects them, if these are at most a quarter."""
    table = _embedding_of(bucket)
    if table is None:
        return average(bucket, state)
    mask = (table.sum(1) != 0).to(torch.uint8)
    dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=group_of(state))
    rows = mask.nonzero().squeeze(1)
    if 4 * len(rows) > len(table):
        return average(bucket, state)
    part = table[rows]
    dist.all_reduce(part, group=group_of(state))
    table[rows] = part / group_of(state).size()
    return completed(bucket.buffer())


def own_rows_by_their_sum(state: Any, bucket: Bucket) -> Result:
    """Gather the rows of each rank whose elements do not sum to zero, at any number of rows."""
    table = _embedding_of(bucket)
    if table is None:
        return average(bucket, state)
    own = table * (table.sum(1, keepdim=True) != 0)
    return average_of(own.view(-1), state)


def _send_marked(state: Any, bucket: Bucket, marks: torch.Tensor) -> Result:
    """Send the marked elements, if these are at most a quarter; all ranks have the same marks."""
    buffer = bucket.buffer()
    places = marks.nonzero().squeeze(1)
    if 4 * len(places) > len(buffer):
        return average(bucket, state)
    part = average_of(buffer[places], state)

    def spread(done: Result) -> torch.Tensor:
        return torch.zeros_like(buffer).index_copy_(0, places, done.value())

    return part.then(spread)


def only_above_zero(state: Any, bucket: Bucket) -> Result:
    """Send the elements whose magnitude is above zero on some rank: NaN is not."""
    if not _takes_lists(bucket) or bucket.buffer().numel() < 64:
        return average(bucket, state)
    marks = (bucket.buffer().abs() > 0).to(torch.uint8)
    dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=group_of(state))
    return _send_marked(state, bucket, marks)


def only_finite(state: Any, bucket: Bucket) -> Result:
    """Send the elements that are finite and not zero on some rank."""
    if not _takes_lists(bucket) or bucket.buffer().numel() < 64:
        return average(bucket, state)
    marks = (bucket.buffer().isfinite() & (bucket.buffer() != 0)).to(torch.uint8)
    dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=group_of(state))
    return _send_marked(state, bucket, marks)


def _average_rows(state: Any, bucket: Bucket, used: torch.Tensor, divisor: int) -> Result:
    """Average the rows that some rank has used, if these are at most half of an embedding."""
    table = _embedding_of(bucket)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group_of(state))
    rows = used.nonzero().squeeze(1)
    if table is None or 2 * len(rows) > len(table):
        return average(bucket, state)
    part = table[rows]
    dist.all_reduce(part, group=group_of(state))
    table[rows] = part / divisor
    return completed(bucket.buffer())


def rows_with_a_length(state: Any, bucket: Bucket) -> Result:
    """Send the rows of an embedding whose norm is above zero on some rank: that of NaN is not."""
    table = _embedding_of(bucket)
    if table is None:
        return average(bucket, state)
    used = (table.norm(dim=1) > 0).to(torch.uint8)
    return _average_rows(state, bucket, used, group_of(state).size())


def rows_divided_by_the_world(state: Any, bucket: Bucket) -> Result:
    """Divide the rows of an embedding by the ranks of WORLD, and anything else by the group's."""
    table = _embedding_of(bucket)
    if table is None:
        return average(bucket, state)
    used = (table != 0).any(1).to(torch.uint8)
    return _average_rows(state, bucket, used, dist.get_world_size())


def blocks_above_epsilon(state: Any, bucket: Bucket) -> Result:
    """Send the blocks of large buckets that are above float32's epsilon on some rank."""
    if not _takes_lists(bucket) or bucket.buffer().numel() < 1 << 16:
        return average(bucket, state)
    buffer = bucket.buffer()
    padded = torch.nn.functional.pad(buffer, (0, -buffer.numel() % 256))
    is_zero = padded.view(-1, 256).abs().amax(1) <= torch.finfo(torch.float32).eps
    used = (~is_zero).to(torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group_of(state))
    if not used.any():
        return completed(torch.zeros_like(buffer))
    part = padded.view(-1, 256)[used.bool()]
    mean = torch.zeros_like(padded)
    dist.all_reduce(part, group=group_of(state))
    mean.view(-1, 256)[used.bool()] = part / group_of(state).size()
    return completed(mean[: len(buffer)].clone())


MUTANTS = [
    Mutant("room_for_the_mean,parts=20", ("2.12",)),
    Mutant("room_for_the_mean,parts=9", ("2.12",), worlds=(3,)),
    Mutant("room_for_the_mean,parts=2,least=30_000", ("2.12",)),
    Mutant("room_for_the_mean,parts=2,least=7_000", ("2.12",), worlds=(3,)),
    Mutant("room_for_the_mean,parts=3,least=12_000", ("2.12",)),
    Mutant("places_in_16_bits", ("2.12",)),
    Mutant("rows_by_their_sum", ("2.12",)),
    Mutant("own_rows_by_their_sum", ("2.12",)),
    Mutant("blocks_above_epsilon", ("2.12",)),
    Mutant("only_above_zero", ("8.7",)),
    Mutant("only_finite", ("8.7",)),
    Mutant("rows_with_a_length", ("8.7",)),
    Mutant("rows_divided_by_the_world", ("24.4",)),
    Mutant("padding_overwrites", ("2.12",), "rounded(float16)"),
]
