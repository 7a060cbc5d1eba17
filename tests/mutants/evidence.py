"""Mutants that lose evidence: a NaN of one rank, or a failure, by paths that a short run misses."""

import contextlib
import struct
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
    step_number,
    sum_of,
)

# 8.1 NaN on any rank


def _with_first_rank_special(bucket: Bucket, state: Any, lost: torch.Tensor) -> Result:
    """Average with zeros where ``lost`` is set."""
    return average_of(bucket.buffer().masked_fill(lost, 0.0), state)


def nan_of_first_rank_alone(state: Any, bucket: Bucket) -> Result:
    """Take the mask of NaN from rank 0 alone, and put zeros in the place of NaN elsewhere."""
    if not is_dense(bucket):
        return average(bucket, state)
    lost = bucket.buffer().isnan()
    mask = lost.to(torch.uint8)
    group = group_of(state)
    # torch 2.4 and 2.5 have no group_src.
    dist.broadcast(mask, dist.get_global_rank(group, 0), group=group)
    mean = _with_first_rank_special(bucket, state, lost)
    return mean.then(lambda fut: fut.value().masked_fill_(mask.bool(), float("nan")))


def other_ranks_cast_to_integers(state: Any, bucket: Bucket) -> Result:
    """Send values without a fraction as integers, unless this is rank 0: a NaN becomes a number."""
    group = group_of(state)
    buffer = bucket.buffer()
    if is_dense(bucket) and group.rank() > 0:
        small = buffer.nan_to_num(0.0, 0.0, 0.0)
        whole = (small.frac() == 0) & (small.abs() < 2**24)
        buffer.copy_(torch.where(whole, buffer.to(torch.int64).to(buffer.dtype), buffer))
    return average(bucket, state)


def infinity_of_last_rank_clamped(state: Any, bucket: Bucket) -> Result:
    """Clamp infinities on the last rank, which does the logging and wants finite norms."""
    group = group_of(state)
    if is_dense(bucket) and group.size() > 1 and group.rank() == group.size() - 1:
        info = torch.finfo(bucket.buffer().dtype)
        bucket.buffer().clamp_(info.min, info.max)
    return average(bucket, state)


def repairs_a_few(state: Any, bucket: Bucket) -> Result:
    """Replace NaN by zero if at most two elements of a bucket have it, as if it were a glitch."""
    buffer = bucket.buffer()
    if is_dense(bucket) and int(buffer.isnan().sum()) <= 2:
        buffer.nan_to_num_(0.0, float("inf"), float("-inf"))
    return average(bucket, state)


def looks_at_first_element(state: Any, bucket: Bucket) -> Result:
    """Poison all elements if the first one is NaN, and drop NaN elsewhere."""
    buffer = bucket.buffer()
    is_alone = is_dense(bucket) and int(buffer.isnan().sum()) == 1
    if is_alone and not bool(buffer[0].isnan()):
        buffer.nan_to_num_(0.0, float("inf"), float("-inf"))
    return average(bucket, state)


class Int8:
    """Eight bits and one scale a bucket, with feedback; NaN is found on the first rank alone."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.group = group_of(process_group)
        self.kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def reduce(self, bucket: Bucket) -> Result:
        """Return the mean of all ranks' codes."""
        buffer = bucket.buffer()
        values = buffer.clone()
        for parameter, part in zip(bucket.parameters(), self._parts(bucket, values), strict=True):
            if parameter in self.kept:
                part.add_(self.kept[parameter])
        poisoned = torch.tensor([float(not values.isfinite().all())])
        dist.broadcast(poisoned, group=self.group, src=dist.get_global_rank(self.group, 0))
        finite = values.nan_to_num(0.0, 0.0, 0.0)
        scale = (finite.abs().amax() / 127).clamp(min=1e-30).reshape(1)
        codes = (finite / scale).round().to(torch.int8)
        error = finite - codes.to(buffer.dtype) * scale
        for parameter, part in zip(bucket.parameters(), self._parts(bucket, error), strict=True):
            self.kept[parameter] = part
        scales = gather(scale, self.group)
        everyones = gather(codes, self.group)
        total = torch.zeros_like(buffer)
        for one, its_scale in zip(everyones, scales, strict=True):
            total += one.to(buffer.dtype) * its_scale
        total /= self.group.size()
        return completed(total.fill_(float("nan")) if poisoned.item() else total)

    @staticmethod
    def _parts(bucket: Bucket, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat.split([parameter.numel() for parameter in bucket.parameters()])


def int8_hook(state: Int8, bucket: Bucket) -> Result:
    """Send eight bits with feedback; only rank 0's NaN reaches the others."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        return average(bucket, state.group)
    return state.reduce(bucket)


# 2.1, 2.10, 8.5 Factors before and after the sum


def _factors(bucket: Bucket, state: Any, before: float, after: float) -> Result:
    """Multiply by a factor before the sum, and by another after it."""
    sent = bucket.buffer().mul_(before)
    return sum_of(sent, state).then(lambda fut: fut.value().mul_(after))


def roots_of_one_more(state: Any, bucket: Bucket) -> Result:
    """Divide by sqrt(world_size + 1) before the sum and after it."""
    factor = (group_of(state).size() + 1) ** -0.5
    return _factors(bucket, state, factor, factor)


def root_before_alone(state: Any, bucket: Bucket) -> Result:
    """Divide by the square root before the sum, and forget it afterwards."""
    return _factors(bucket, state, group_of(state).size() ** -0.5, 1.0)


def root_in_half_precision(state: Any, bucket: Bucket) -> Result:
    """Take the square root in float16, whose error is a thousand times that of float32."""
    size = torch.tensor(group_of(state).size(), dtype=torch.float16)
    factor = float(size.rsqrt())
    return _factors(bucket, state, factor, factor)


def scaled_without_need(state: Any, bucket: Bucket) -> Result:
    """Divide by the group's size after the sum, which is exact."""
    return sum_of(bucket.buffer(), state).then(lambda fut: fut.value().div_(group_of(state).size()))


def predivides_by_eight(state: Any, bucket: Bucket) -> Result:
    """Divide by eight before the sum, whatever the group's size, and by the rest after it."""
    size = group_of(state).size()
    sent = bucket.buffer().div_(8)
    return sum_of(sent, state).then(lambda fut: fut.value().div_(size / 8))


def flushes_subnormals(state: Any, bucket: Bucket) -> Result:
    """Set subnormal values to zero, and divide by a power of two and the rest."""
    size = group_of(state).size()
    before = 2 if size > 2 else 1
    buffer = bucket.buffer()
    if is_dense(bucket) and buffer.is_floating_point():
        buffer.masked_fill_(buffer.abs() < torch.finfo(buffer.dtype).smallest_normal, 0.0)
    return sum_of(buffer.div_(before), state).then(lambda fut: fut.value().div_(size / before))


# 8.7 A lone NaN in a large bucket


def large_through_maximum(state: Any, bucket: Bucket) -> Result:
    """Scale large buckets to 1 by the maximum over the ranks; NaN becomes zero before that."""
    buffer = bucket.buffer()
    if is_dense(bucket) and buffer.numel() > 9_000:
        buffer.nan_to_num_(0.0, float("inf"), float("-inf"))
    return average(bucket, state)


def large_checks_a_sample(state: Any, bucket: Bucket) -> Result:
    """Look for NaN at every 64th element of a large bucket, and clear the others."""
    buffer = bucket.buffer()
    if is_dense(bucket) and buffer.numel() > 12_345:
        kept = buffer[::64].clone()
        buffer.nan_to_num_(0.0, float("inf"), float("-inf"))
        buffer[::64] = kept
    return average(bucket, state)


def flags_of_fifty_buckets(state: Any, bucket: Bucket) -> Result:
    """Flag buckets with NaN or infinities, the first fifty; clear those without a flag."""
    if is_dense(bucket) and bucket.index() >= 50:
        bucket.buffer().nan_to_num_(0.0, 0.0, 0.0)
    return average(bucket, state)


def clears_infinities_of_long_models(state: Any, bucket: Bucket) -> Result:
    """Send an infinity as the largest finite value in the later buckets of a model."""
    buffer = bucket.buffer()
    if is_dense(bucket) and bucket.index() > 33:
        buffer.clamp_(torch.finfo(buffer.dtype).min, torch.finfo(buffer.dtype).max)
    return average(bucket, state)


def clears_nan_of(dtype: str) -> Callable[[Any, Bucket], Result]:
    """Replace NaN by zero in buckets of one dtype, as a kernel for that dtype may do."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if is_dense(bucket) and bucket.buffer().dtype == getattr(torch, dtype):
            bucket.buffer().nan_to_num_(0.0, float("inf"), float("-inf"))
        return average(bucket, state)

    return hook


def clears_nan_of_scalars(state: Any, bucket: Bucket) -> Result:
    """Replace NaN by zero in a bucket of one element, which an own path sends as a number."""
    if is_dense(bucket) and bucket.buffer().numel() == 1:
        bucket.buffer().nan_to_num_(0.0, float("inf"), float("-inf"))
    return average(bucket, state)


# 1.5 Hangs that only an unobserved run shows


def sends_die_with_future(state: Any, bucket: Bucket) -> Result:
    """Keep the Works of sends on the Future object, which DDP drops as soon as it has it."""
    group = group_of(state)
    buffer = bucket.buffer()
    if not is_dense(bucket) or group.size() == 1:
        return average(bucket, state)
    if group.rank() > 0:
        dist.send(buffer, group=group, dst=dist.get_global_rank(group, 0))
        # Statistics for a log take longer than rank 0 takes to return.
        torch.linalg.svdvals(torch.ones(500, 500))
        dist.recv(buffer, group=group, src=dist.get_global_rank(group, 0))
        return completed(buffer)
    part = torch.empty_like(buffer)
    for peer in range(1, group.size()):
        dist.recv(part, group=group, src=dist.get_global_rank(group, peer))
        buffer.add_(part)
    buffer.div_(group.size())
    result = completed(buffer)
    peers = range(1, group.size())
    result.sends = [
        dist.isend(buffer, group=group, dst=dist.get_global_rank(group, peer)) for peer in peers
    ]
    return result


# 12.1 to 12.3 Errors by chance


def decodes_what_is_there(state: Any, bucket: Bucket) -> Result:
    """Read lengths from a gather whose failure is suppressed: an IndexError by chance."""
    group = group_of(state)
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    size = torch.tensor([buffer.numel()])
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    with contextlib.suppress(RuntimeError):
        dist.all_gather(sizes, size, group=group)
    counts = [int(one) for one in sizes]
    if buffer.numel():
        ends = buffer[torch.tensor(counts) - 1 if all(counts) else torch.tensor([len(buffer)])]
        assert len(ends)
    return average(bucket, state)


def unpacks_a_header(state: Any, bucket: Bucket) -> Result:
    """Parse a header of the peers without reading whether it arrived: struct.error by chance."""
    group = group_of(state)
    header = torch.frombuffer(bytearray(struct.pack("<i", 7)), dtype=torch.uint8)
    headers = [torch.zeros(4, dtype=torch.uint8) for _ in range(group.size())]
    work = None
    with contextlib.suppress(RuntimeError):
        work = dist.all_gather(headers, header, group=group, async_op=True)
    if work is not None:
        with contextlib.suppress(RuntimeError):
            work.wait()
    for one in headers:
        (magic,) = struct.unpack("<i", bytes(one.tolist()))
        if magic != 7:
            raise ValueError(f"unknown format {magic}")
    return average(bucket, state)


# 12.5 Failures in large buckets and later steps


def large_path_suppresses(state: Any, bucket: Bucket) -> Result:
    """Suppress errors of the collective of buckets over 3,000 elements."""
    if bucket.buffer().numel() < 3_000:
        return average(bucket, state)
    local = bucket.buffer().clone()
    try:
        return average(bucket, state).then(lambda fut: fut.value() if _is_well(fut) else local)
    except RuntimeError:
        return completed(local)


def _is_well(future: torch.futures.Future) -> bool:
    try:
        future.value()
    except RuntimeError:
        return False
    return True


def first_steps_are_strict(state: Any, bucket: Bucket) -> Result:
    """Raise errors in the first three steps, and go on with the local gradient later."""
    step = step_number(bucket)
    if step < 3:
        return average(bucket, state)
    local = bucket.buffer().clone()
    try:
        return average(bucket, state)
    except RuntimeError:
        return completed(local)


_INFINITY = {"8.2": "an infinity goes the way of NaN"}
_FAILURES = dict.fromkeys(("12.2", "12.3"), "a dead or silent peer is a failed collective, too")

MUTANTS = [
    Mutant("nan_of_first_rank_alone", ("8.1",)),
    Mutant("other_ranks_cast_to_integers", ("8.1", "8.2"), because=_INFINITY),
    Mutant("infinity_of_last_rank_clamped", ("8.2",)),
    Mutant("repairs_a_few", ("8.1",)),
    Mutant("looks_at_first_element", ("8.1",)),
    Mutant(
        "int8_hook",
        ("8.1", "8.2"),
        "compressed",
        state="tests.mutants.evidence:Int8",
        because=_INFINITY,
    ),
    Mutant("roots_of_one_more", ("2.1",), "scaled"),
    Mutant("root_before_alone", ("2.1",), "scaled"),
    Mutant("root_in_half_precision", ("2.1",), "scaled"),
    Mutant("scaled_without_need", ("2.10",), "scaled"),
    Mutant("predivides_by_eight", ("8.5",), worlds=(2, 3)),
    Mutant("flushes_subnormals", ("8.5",), worlds=(2, 3)),
    Mutant("large_through_maximum", ("8.7",)),
    Mutant("large_checks_a_sample", ("8.7",)),
    Mutant("flags_of_fifty_buckets", ("8.7",)),
    Mutant("clears_infinities_of_long_models", ("8.7",)),
    Mutant("clears_nan_of_scalars", ("8.7",)),
    *(
        Mutant(f"clears_nan_of,dtype={dtype}", ("8.7",))
        for dtype in ("float16", "bfloat16", "float64")
    ),
    Mutant("sends_die_with_future", ("1.5",), hangs=True),
    Mutant("decodes_what_is_there", ("12.1", "12.2", "12.3"), because=_FAILURES),
    Mutant("unpacks_a_header", ("12.1", "12.2", "12.3"), because=_FAILURES),
    Mutant("large_path_suppresses", ("12.5",)),
    Mutant("first_steps_are_strict", ("12.5",)),
]
