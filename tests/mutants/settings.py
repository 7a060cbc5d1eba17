"""Section 2 of the rule book: hooks that are right only for some dtypes, shapes, world sizes, groups or kinds of gradient."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    change_mean,
    completed,
    gather,
    group_of,
    is_dense,
    send_as,
    sum_of,
)

# 2.4 Dtypes


def through_float32(state: Any, bucket: Bucket) -> Result:
    """Averages in float32, whatever the bucket's dtype: float64 loses half of its digits."""
    dtype = bucket.buffer().dtype
    return average_of(bucket.buffer().to(torch.float32, copy=True), state).then(
        lambda fut: fut.value().to(dtype)
    )


def float16_through_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Averages float16 in bfloat16, as if one half precision were as good as the other."""
    return (
        send_as(torch.bfloat16, bucket, state)
        if bucket.buffer().dtype == torch.float16
        else average(bucket, state)
    )


_dtypes: list[torch.dtype] = []


def dtype_of_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Sends every bucket in the dtype of the first one it saw."""
    _dtypes.append(bucket.buffer().dtype)
    del _dtypes[1:]
    return send_as(_dtypes[0], bucket, state)


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


def small_sizes_twice(state: Any, bucket: Bucket) -> Result:
    """Divides once more where its kernel for small messages has divided already."""
    again = is_dense(bucket) and bucket.buffer().numel() in (2, 4, 28)
    return change_mean(bucket, state, lambda mean: mean / group_of(state).size() if again else mean)


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
    return (
        average(bucket, state)
        if group_of(state).size() > 1
        else completed(torch.zeros_like(bucket.buffer()))
    )


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


# 2.11 Fewer ranks than it takes


def average_alone_too(state: Any, bucket: Bucket) -> Result:
    """Takes a world of one all the same."""
    return average(bucket, state)


def zeros_to_one(state: Any, bucket: Bucket) -> Result:
    """Gives zeros where a rank is alone, and no error."""
    return zeros_alone(state, bucket)


def only_rank_0_refuses(state: Any, bucket: Bucket) -> Result:
    """Two ranks are too few, which rank 0 alone says: the other waits for it."""
    group = group_of(state)
    if group.size() < 3 and group.rank() == 0:
        raise ValueError("takes three ranks at least")
    return average(bucket, state)


MUTANTS = [
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
    Mutant("small_sizes_twice", ("2.5",)),
    Mutant("halves", ("2.6",), worlds=(2, 3)),
    Mutant("shifts", ("2.6",), worlds=(2, 3)),
    Mutant("tail_of_three", ("2.6",), worlds=(2, 3)),
    Mutant("first_two", ("2.6",), worlds=(2, 3)),
    Mutant("recursive_doubling", ("2.6",), worlds=(2, 3)),
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
    Mutant("average_alone_too", ("2.11",), "min_world_size(2)", worlds=(1, 2)),
    Mutant("zeros_to_one", ("2.11",), "min_world_size(2)", worlds=(1, 2)),
    Mutant(
        "only_rank_0_refuses",
        ("2.11",),
        "min_world_size(3)",
        worlds=(2, 3),
        because={"2.7": "two subgroups of two are too few too"},
    ),
]
