"""Section 2 of the rule book: hooks whose result is not the mean over the group."""

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
    sum_of,
)

# 2.1 The mean


def never_divides(state: Any, bucket: Bucket) -> Result:
    """Returns the sum."""
    return sum_of(bucket.buffer(), state)


def divides_twice(state: Any, bucket: Bucket) -> Result:
    """Divides by the world size before the sum and after it."""
    return average(bucket, state).then(lambda fut: fut.value().div_(group_of(state).size()))


def divides_average(state: Any, bucket: Bucket) -> Result:
    """Divides what ReduceOp.AVG has divided already."""
    if not is_dense(bucket):
        return average(bucket, state)
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group_of(state), async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0].div_(group_of(state).size()))


def divides_by_eight(state: Any, bucket: Bucket) -> Result:
    """Divides by eight, the number of GPUs of the machine it was written on."""
    return sum_of(bucket.buffer().div_(8), state)


def divides_by_others(state: Any, bucket: Bucket) -> Result:
    """Divides by the number of other ranks."""
    return sum_of(bucket.buffer().div_(max(1, group_of(state).size() - 1)), state)


def local(state: Any, bucket: Bucket) -> Result:
    """Communicates nothing."""
    return completed(bucket.buffer())


def copy_of_running(state: Any, bucket: Bucket) -> Result:
    """Returns a copy of the bucket that it took before the collective was over."""
    result = bucket.buffer().clone()
    average(bucket, state).wait()
    return completed(result)


def set_buffer_only(state: Any, bucket: Bucket) -> Result:
    """Hands the mean to bucket.set_buffer, which DDP never reads, and returns the old buffer."""
    old = bucket.buffer()
    bucket.set_buffer(average_of(old.clone(), state).wait())
    return completed(old)


def rank_0_wins(state: Any, bucket: Bucket) -> Result:
    """Broadcasts rank 0's gradient instead of reducing."""
    work = dist.broadcast(bucket.buffer(), group=group_of(state), group_src=0, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def only_rank_0_gets_it(state: Any, bucket: Bucket) -> Result:
    """Reduces to rank 0 and forgets to send the mean back."""
    buffer = bucket.buffer().div_(group_of(state).size())
    if group_of(state).rank() != 0:
        dist.reduce(buffer.clone(), group=group_of(state), group_dst=0)
    else:
        dist.reduce(buffer, group=group_of(state), group_dst=0)
    return completed(buffer)


_previous: dict[tuple[int, int], torch.Tensor] = {}


def stale(state: Any, bucket: Bucket) -> Result:
    """Returns the mean of the step before."""

    def swap(mean: torch.Tensor) -> torch.Tensor:
        key = (bucket.index(), mean.numel())
        result, _previous[key] = _previous.get(key, mean), mean.clone()
        return result

    return change_mean(bucket, state, swap)


def momentum(state: Any, bucket: Bucket) -> Result:
    """Mixes the mean with the one of the step before."""

    def mix(mean: torch.Tensor) -> torch.Tensor:
        key = (bucket.index(), mean.numel())
        _previous[key] = (mean + _previous.get(key, mean)) / 2
        return _previous[key].clone()

    return change_mean(bucket, state, mix)


def wrong_sign(state: Any, bucket: Bucket) -> Result:
    """Returns the mean with the opposite sign."""
    return average(bucket, state).then(lambda fut: fut.value().neg_())


def largest(state: Any, bucket: Bucket) -> Result:
    """Takes the largest value of all ranks."""
    if not is_dense(bucket):
        return average(bucket, state)
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.MAX, group=group_of(state), async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def flipped(state: Any, bucket: Bucket) -> Result:
    """Lays the elements out in reverse."""
    return change_mean(bucket, state, lambda mean: mean.flip(0))


def zeros(state: Any, bucket: Bucket) -> Result:
    """Returns a buffer that nobody filled."""
    return average(bucket, state).then(lambda fut: torch.zeros_like(fut.value()))


def nan_result(state: Any, bucket: Bucket) -> Result:
    """Returns NaN."""
    return change_mean(bucket, state, lambda mean: mean.mul(float("nan")))


def last_element_local(state: Any, bucket: Bucket) -> Result:
    """Right but for the last element, which it leaves out of the collective."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    return average_of(buffer[:-1], state).then(lambda fut: (fut.value(), buffer)[1])


def top_half(state: Any, bucket: Bucket) -> Result:
    """Sends the larger half of its elements and drops the rest."""
    return change_gradient(bucket, state, lambda grad: grad * (grad.abs() >= grad.abs().median()))


def lone_groups() -> dist.ProcessGroup:
    """A state that goes with :func:`average_hook`: for each rank a group of its own."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def average_hook(state: Any, bucket: Bucket) -> Result:
    """Right, but given a group of this rank alone as its state."""
    return average(bucket, state)


# 2.2 Random values


def rounds_to_float16(state: Any, bucket: Bucket) -> Result:
    """Sends float16 without saying so."""
    return _send_as(torch.float16, bucket, state)


def rounds_to_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Sends bfloat16 without saying so."""
    return _send_as(torch.bfloat16, bucket, state)


def _send_as(dtype: torch.dtype, bucket: Bucket, state: Any) -> Result:
    buffer = bucket.buffer()
    return average_of(buffer.to(dtype, copy=True), state).then(lambda fut: fut.value().to(buffer.dtype))


def cuts_mantissa(state: Any, bucket: Bucket) -> Result:
    """Cuts float32 to the ten bits of mantissa that TF32 has."""
    return change_gradient(bucket, state, lambda grad: _keep_bits(grad, -(1 << 13)))


def rounds_at_random(state: Any, bucket: Bucket) -> Result:
    """Rounds float32 to bfloat16 at random, by a generator of its own."""

    def dither(grad: torch.Tensor) -> torch.Tensor:
        if grad.dtype == torch.float32:
            grad.view(torch.int32).add_(torch.randint(1 << 16, grad.shape, generator=_generator, dtype=torch.int32))
        return _keep_bits(grad, -(1 << 16))

    return change_gradient(bucket, state, dither)


_generator = torch.Generator().manual_seed(1)


def _keep_bits(grad: torch.Tensor, mask: int) -> torch.Tensor:
    if grad.dtype == torch.float32:
        grad.view(torch.int32).bitwise_and_(mask)
    return grad


def rounds_to_three_decimals(state: Any, bucket: Bucket) -> Result:
    """Rounds the mean to three decimals."""
    return change_mean(bucket, state, lambda mean: mean.double().round(decimals=3).to(mean.dtype))


# 2.3 A wide range


def scales_by_largest(state: Any, bucket: Bucket) -> Result:
    """Scales the bucket by a power of two near its largest value: small values vanish beside large ones."""
    if not is_dense(bucket):
        return average(bucket, state)
    top = bucket.buffer().double().nan_to_num(0, 0, 0).abs().amax()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group_of(state))
    scale = torch.where(top > 2.0**40, top.log2().ceil().exp2(), 1.0)
    scaled = bucket.buffer().double().div(scale).to(bucket.buffer().dtype)
    return average_of(scaled, state).then(lambda fut: fut.value().double().mul(scale).to(fut.value().dtype))


def scales_up(state: Any, bucket: Bucket) -> Result:
    """Sends float32 times 2**60 against underflow: large values overflow."""
    scale = 2.0**60 if bucket.buffer().dtype == torch.float32 else 1.0
    return average_of(bucket.buffer().mul_(scale), state).then(lambda fut: fut.value().div_(scale))


def clamps(state: Any, bucket: Bucket) -> Result:
    """Clamps finite values beyond 1e10."""

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        limit = min(1e10, torch.finfo(grad.dtype).max)
        return torch.where(grad.isinf(), grad, grad.clamp(-limit, limit))

    return change_gradient(bucket, state, clamp)


def drops_small(state: Any, bucket: Bucket) -> Result:
    """Drops values below 1e-20 that are not subnormal, as noise."""

    def drop(grad: torch.Tensor) -> torch.Tensor:
        size = grad.double().abs()
        return grad.masked_fill((size < 1e-20) & (size >= torch.finfo(torch.float32).tiny), 0.0)

    return change_gradient(bucket, state, drop)


# 2.4 Dtypes


def through_float32(state: Any, bucket: Bucket) -> Result:
    """Averages in float32, whatever the bucket's dtype: float64 loses half of its digits."""
    dtype = bucket.buffer().dtype
    return average_of(bucket.buffer().to(torch.float32, copy=True), state).then(lambda fut: fut.value().to(dtype))


def float16_through_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Averages float16 in bfloat16, as if one half precision were as good as the other."""
    return _send_as(torch.bfloat16, bucket, state) if bucket.buffer().dtype == torch.float16 else average(bucket, state)


_dtypes: list[torch.dtype] = []


def dtype_of_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Sends every bucket in the dtype of the first one it saw."""
    _dtypes.append(bucket.buffer().dtype)
    del _dtypes[1:]
    return _send_as(_dtypes[0], bucket, state)


def epsilon_in_divisor(state: Any, bucket: Bucket) -> Result:
    """Adds 1e-12 to the divisor: float64 feels it."""
    return sum_of(bucket.buffer().div_(group_of(state).size() + 1e-12), state)


def float32_only(state: Any, bucket: Bucket) -> Result:
    """Views its bytes as float32 to send them: garbage for any other dtype of an even size."""
    buffer = bucket.buffer()
    if buffer.dtype == torch.float32 or not is_dense(bucket):
        return average(bucket, state)
    buffer.div_(group_of(state).size())
    return sum_of(buffer.view(torch.uint8), state).then(lambda fut: fut.value().view(buffer.dtype))


def asserts_float32(state: Any, bucket: Bucket) -> Result:
    """Takes no dtype but float32."""
    assert bucket.buffer().dtype == torch.float32
    return average(bucket, state)


# 2.5 Shapes

_CHUNK = 1_000_000


def drops_tail_of_chunks(state: Any, bucket: Bucket) -> Result:
    """Sends buckets above a million elements in chunks, and forgets to divide what is left over."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    whole = buffer.numel() // _CHUNK * _CHUNK or buffer.numel()
    buffer[:whole].div_(group_of(state).size())
    return sum_of(buffer, state)


def scalar_undivided(state: Any, bucket: Bucket) -> Result:
    """Takes a 0-d parameter for a counter, which is to be summed."""
    if is_dense(bucket):
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter.dim() == 0:
                grad.mul_(group_of(state).size())
    return average(bucket, state)


def flattens_p_grad(state: Any, bucket: Bucket) -> Result:
    """Builds the bucket from p.grad in C order: a channels_last parameter lies otherwise."""
    if not is_dense(bucket) or any(p.is_complex() for p in bucket.parameters()):
        return average(bucket, state)
    return average_of(torch.cat([p.grad.flatten() for p in bucket.parameters()]), state)


_seen: list[float] = []


def logs_largest(state: Any, bucket: Bucket) -> Result:
    """Looks up the largest value of each parameter's gradient for its log: an empty one has none."""
    if is_dense(bucket):
        _seen[:] = [grad.abs().max().item() for grad in bucket.gradients()]
    return average(bucket, state)


def logs_rows(state: Any, bucket: Bucket) -> Result:
    """Looks up each parameter's number of rows for its log: a 0-d one has none."""
    _seen[:] = [parameter.shape[0] for parameter in bucket.parameters()]
    return average(bucket, state)


# 2.6 World sizes


def halves(state: Any, bucket: Bucket) -> Result:
    """Divides by two, whatever the world size."""
    return sum_of(bucket.buffer().div_(2), state)


def shifts(state: Any, bucket: Bucket) -> Result:
    """Divides by the largest power of two that the world size holds."""
    return sum_of(bucket.buffer().div_(1 << (group_of(state).size().bit_length() - 1)), state)


def tail_of_three(state: Any, bucket: Bucket) -> Result:
    """Among three ranks and more, leaves the last numel % world_size elements undivided."""
    size = group_of(state).size()
    if size < 3 or not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    buffer[: buffer.numel() // size * size].div_(size)
    return sum_of(buffer, state)


def first_two(state: Any, bucket: Bucket) -> Result:
    """Gathers from all ranks, and averages the first two."""
    if not is_dense(bucket):
        return average(bucket, state)
    return completed(torch.stack(gather(bucket.buffer(), state)[:2]).mean(0))


def recursive_doubling(state: Any, bucket: Bucket) -> Result:
    """Exchanges with rank ^ 1, rank ^ 2, ...: right only for powers of two."""
    group = group_of(state)
    if not is_dense(bucket):
        return average(bucket, state)
    buffer, distance = bucket.buffer().div_(group.size()), 1
    while distance < group.size():
        partner = group.rank() ^ distance
        if partner < group.size():
            received = torch.empty_like(buffer)
            sending = dist.isend(buffer, group=group, group_dst=partner)
            dist.recv(received, group=group, group_src=partner)
            sending.wait()
            buffer += received
        distance *= 2
    return completed(buffer)


def zeros_alone(state: Any, bucket: Bucket) -> Result:
    """In a world of one, returns a buffer that nobody filled."""
    return average(bucket, state) if group_of(state).size() > 1 else completed(torch.zeros_like(bucket.buffer()))


def needs_a_peer(state: Any, bucket: Bucket) -> Result:
    """Weighs the others by 1 / (world_size - 1), which a world of one does not have."""
    others = group_of(state).size() - 1
    weight = 1 / others
    return change_mean(bucket, state, lambda mean: mean * (weight * others))


# 2.7 Subgroups


def uses_world(state: Any, bucket: Bucket) -> Result:
    """Ignores the group it was given."""
    return average(bucket, None)


def world_divisor(state: Any, bucket: Bucket) -> Result:
    """Sums over its group and divides by the size of WORLD."""
    return sum_of(bucket.buffer().div_(dist.get_world_size()), state)


def global_root(state: Any, bucket: Bucket) -> Result:
    """Reduces to global rank 0 and broadcasts from it, though it may not be in the group."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer().div_(group_of(state).size())
    dist.reduce(buffer, dst=0, group=group_of(state))
    dist.broadcast(buffer, src=0, group=group_of(state))
    return completed(buffer)


def global_place(state: Any, bucket: Bucket) -> Result:
    """Takes its global rank for its place in the group."""
    if not is_dense(bucket):
        return average(bucket, state)
    group = group_of(state)
    slots = torch.zeros(group.size(), bucket.buffer().numel(), dtype=bucket.buffer().dtype)
    slots[dist.get_rank() % group.size()] = bucket.buffer().div_(group.size())
    dist.all_reduce(slots, group=group)
    slots[group.rank()] = bucket.buffer()
    return completed(slots.sum(0))


# 2.8 Complex parameters


def real_parts_only(state: Any, bucket: Bucket) -> Result:
    """Averages the real parts of complex parameters and sums the imaginary ones."""
    if any(parameter.is_complex() for parameter in bucket.parameters()):
        bucket.buffer()[1::2].mul_(group_of(state).size())
    return average(bucket, state)


# 2.9 Sparse gradients


def sparse_stays_local(state: Any, bucket: Bucket) -> Result:
    """Leaves sparse gradients alone."""
    return average(bucket, state) if is_dense(bucket) else completed(bucket.buffer())


def sparse_undivided(state: Any, bucket: Bucket) -> Result:
    """Sums sparse gradients."""
    return average(bucket, state) if is_dense(bucket) else sum_of(bucket.buffer(), state)


def sparse_values_only(state: Any, bucket: Bucket) -> Result:
    """Averages the values of sparse gradients by position, whichever rows they belong to."""
    if is_dense(bucket):
        return average(bucket, state)
    sparse = bucket.buffer().coalesce()
    average_of(sparse.values(), state).wait()
    return completed(sparse)


# 2.10 True claims


def claims_rounded(state: Any, bucket: Bucket) -> Result:
    """Says that it rounds to float16, and does not."""
    return average(bucket, state)


def claims_other_half(state: Any, bucket: Bucket) -> Result:
    """Says that it rounds to float16, and rounds to bfloat16."""
    return _send_as(torch.bfloat16, bucket, state)


def saturates(state: Any, bucket: Bucket) -> Result:
    """Rounds to float16 as it says, but turns what overflows into a finite value."""

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(torch.float16).max
        return torch.where(grad.isinf(), grad, grad.clamp(-limit, limit)).half()

    dtype = bucket.buffer().dtype
    return change_gradient(bucket, state, clamp).then(lambda fut: fut.value().to(dtype))


def claims_sum(state: Any, bucket: Bucket) -> Result:
    """Says that it gives the sum, and gives the mean."""
    return average(bucket, state)


def claims_world_only(state: Any, bucket: Bucket) -> Result:
    """Says that it always uses WORLD, and uses the group it was given."""
    return average(bucket, state)


_loses_subnormals = {"8.5": "the rounding loses subnormals"}

MUTANTS = [
    Mutant("never_divides", ("2.1",)),
    Mutant("divides_twice", ("2.1",)),
    Mutant("divides_average", ("2.1",)),
    Mutant("divides_by_eight", ("2.1",)),
    Mutant("divides_by_others", ("2.1",)),
    Mutant("local", ("2.1",)),
    Mutant("copy_of_running", ("2.1",)),
    Mutant("set_buffer_only", ("2.1",)),
    Mutant("rank_0_wins", ("2.1",)),
    Mutant("only_rank_0_gets_it", ("2.1",)),
    Mutant("stale", ("2.1",)),
    Mutant("momentum", ("2.1",)),
    Mutant("wrong_sign", ("2.1",)),
    Mutant("largest", ("2.1",)),
    Mutant("flipped", ("2.1",)),
    Mutant("zeros", ("2.1",)),
    Mutant("nan_result", ("2.1",)),
    Mutant("last_element_local", ("2.1",)),
    Mutant("top_half", ("2.1",)),
    Mutant("average_hook", ("2.1",), state="tests.mutants.equivalence:lone_groups"),
    Mutant("rounds_to_float16", ("2.2", "8.5"), because=_loses_subnormals),
    Mutant("rounds_to_bfloat16", ("2.2", "8.5"), because=_loses_subnormals),
    Mutant("cuts_mantissa", ("2.2", "8.5"), because=_loses_subnormals),
    Mutant("rounds_at_random", ("2.2", "8.5"), because=_loses_subnormals),
    Mutant("rounds_to_three_decimals", ("2.2", "8.5"), because=_loses_subnormals),
    Mutant("scales_by_largest", ("2.3",)),
    Mutant("scales_up", ("2.3",)),
    Mutant("clamps", ("2.3",)),
    Mutant("drops_small", ("2.3",)),
    Mutant("through_float32", ("2.4",)),
    Mutant("float16_through_bfloat16", ("2.4",)),
    Mutant("dtype_of_first_bucket", ("2.4",)),
    Mutant("epsilon_in_divisor", ("2.4",)),
    Mutant("float32_only", ("2.4",)),
    Mutant("asserts_float32", ("2.4",)),
    Mutant("drops_tail_of_chunks", ("2.5",)),
    Mutant("scalar_undivided", ("2.5",)),
    Mutant("flattens_p_grad", ("2.5",)),
    Mutant("logs_largest", ("2.5",)),
    Mutant("logs_rows", ("2.5",)),
    Mutant("halves", ("2.6",)),
    Mutant("shifts", ("2.6",)),
    Mutant("tail_of_three", ("2.6",)),
    Mutant("first_two", ("2.6",)),
    Mutant("recursive_doubling", ("2.6",)),
    Mutant("zeros_alone", ("2.6",), worlds=(1, 2)),
    Mutant("needs_a_peer", ("2.6",), worlds=(1, 2)),
    Mutant("uses_world", ("2.7",)),
    Mutant("world_divisor", ("2.7",)),
    Mutant("global_root", ("2.7",)),
    Mutant("global_place", ("2.7",)),
    Mutant("real_parts_only", ("2.8",)),
    Mutant("sparse_stays_local", ("2.9",)),
    Mutant("sparse_undivided", ("2.9",)),
    Mutant("sparse_values_only", ("2.9",)),
    Mutant("claims_rounded", ("2.10",), claims="rounded(float16)"),
    Mutant("claims_other_half", ("2.2",), claims="rounded(float16)"),
    Mutant("saturates", ("2.3",), claims="rounded(float16)"),
    Mutant("claims_sum", ("2.1",), claims="sum"),
    Mutant("claims_world_only", ("2.7",), claims="world_only"),
]
