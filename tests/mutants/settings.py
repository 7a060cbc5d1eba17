"""Mutants of section 2: hooks that are right for some settings only.

The settings are dtypes, shapes, world sizes, groups and kinds of gradient.
"""

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
    """Average in float32, so that float64 loses half of its digits."""
    dtype = bucket.buffer().dtype
    return average_of(bucket.buffer().to(torch.float32, copy=True), state).then(
        lambda fut: fut.value().to(dtype)
    )


def float16_through_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Average float16 in bfloat16."""
    return (
        send_as(torch.bfloat16, bucket, state)
        if bucket.buffer().dtype == torch.float16
        else average(bucket, state)
    )


_dtypes: list[torch.dtype] = []


def dtype_of_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Send every bucket in the dtype of the first one."""
    _dtypes.append(bucket.buffer().dtype)
    del _dtypes[1:]
    return send_as(_dtypes[0], bucket, state)


def epsilon_in_divisor(state: Any, bucket: Bucket) -> Result:
    """Add 1e-12 to the divisor, which changes float64 results."""
    return sum_of(bucket.buffer().div_(group_of(state).size() + 1e-12), state)


def float32_only(state: Any, bucket: Bucket) -> Result:
    """Sum the bytes of dtypes other than float32."""
    buffer = bucket.buffer()
    if buffer.dtype == torch.float32 or not is_dense(bucket):
        return average(bucket, state)
    buffer.div_(group_of(state).size())
    return sum_of(buffer.view(torch.uint8), state).then(lambda fut: fut.value().view(buffer.dtype))


def asserts_float32(state: Any, bucket: Bucket) -> Result:
    """Accept float32 only."""
    assert bucket.buffer().dtype == torch.float32
    return average(bucket, state)


# 2.5 Shapes

_CHUNK = 1_000_000


def drops_tail_of_chunks(state: Any, bucket: Bucket) -> Result:
    """Forget to divide the last, incomplete chunk of a bucket above a million elements."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    whole = buffer.numel() // _CHUNK * _CHUNK or buffer.numel()
    buffer[:whole].div_(group_of(state).size())
    return sum_of(buffer, state)


def scalar_undivided(state: Any, bucket: Bucket) -> Result:
    """Sum 0-d parameters as if they were counters."""
    if is_dense(bucket):
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter.dim() == 0:
                grad.mul_(group_of(state).size())
    return average(bucket, state)


def flattens_p_grad(state: Any, bucket: Bucket) -> Result:
    """Build the bucket from p.grad in C order, which permutes channels_last parameters."""
    if not is_dense(bucket) or any(p.is_complex() for p in bucket.parameters()):
        return average(bucket, state)
    return average_of(torch.cat([p.grad.flatten() for p in bucket.parameters()]), state)


_seen: list[float] = []


def logs_largest(state: Any, bucket: Bucket) -> Result:
    """Compute the largest value of each gradient, which an empty one does not have."""
    if is_dense(bucket):
        _seen[:] = [grad.abs().max().item() for grad in bucket.gradients()]
    return average(bucket, state)


def logs_rows(state: Any, bucket: Bucket) -> Result:
    """Read each parameter's number of rows, which a 0-d one does not have."""
    _seen[:] = [parameter.shape[0] for parameter in bucket.parameters()]
    return average(bucket, state)


def small_sizes_twice(state: Any, bucket: Bucket) -> Result:
    """Divide some small buckets twice."""
    again = is_dense(bucket) and bucket.buffer().numel() in (2, 4, 28)
    return change_mean(bucket, state, lambda mean: mean / group_of(state).size() if again else mean)


# 2.6 World sizes


def halves(state: Any, bucket: Bucket) -> Result:
    """Divide by two at any world size."""
    return sum_of(bucket.buffer().div_(2), state)


def shifts(state: Any, bucket: Bucket) -> Result:
    """Divide by the largest power of two up to the world size."""
    return sum_of(bucket.buffer().div_(1 << (group_of(state).size().bit_length() - 1)), state)


def tail_of_three(state: Any, bucket: Bucket) -> Result:
    """Forget to divide the last numel % world_size elements with three ranks or more."""
    size = group_of(state).size()
    if size < 3 or not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    buffer[: buffer.numel() // size * size].div_(size)
    return sum_of(buffer, state)


def first_two(state: Any, bucket: Bucket) -> Result:
    """Average the first two ranks only."""
    if not is_dense(bucket):
        return average(bucket, state)
    return completed(torch.stack(gather(bucket.buffer(), state)[:2]).mean(0))


def recursive_doubling(state: Any, bucket: Bucket) -> Result:
    """Exchange with rank ^ 1, rank ^ 2, ..., which is right for powers of two only."""
    group = group_of(state)
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer().div_(group.size())
    distance = 1
    while distance < group.size():
        partner = group.rank() ^ distance
        if partner < group.size():
            received = torch.empty_like(buffer)
            sending = dist.isend(buffer, group=group, dst=dist.get_global_rank(group, partner))
            dist.recv(received, group=group, src=dist.get_global_rank(group, partner))
            sending.wait()
            buffer += received
        distance *= 2
    return completed(buffer)


def zeros_alone(state: Any, bucket: Bucket) -> Result:
    """Return zeros in a world of one rank."""
    return (
        average(bucket, state)
        if group_of(state).size() > 1
        else completed(torch.zeros_like(bucket.buffer()))
    )


def needs_a_peer(state: Any, bucket: Bucket) -> Result:
    """Divide by world_size - 1, which is zero in a world of one rank."""
    others = group_of(state).size() - 1
    weight = 1 / others
    return change_mean(bucket, state, lambda mean: mean * (weight * others))


# 2.7 Subgroups


def uses_world(state: Any, bucket: Bucket) -> Result:
    """Average over WORLD instead of the group."""
    return average(bucket, None)


def world_divisor(state: Any, bucket: Bucket) -> Result:
    """Sum over the group, and divide by the size of WORLD."""
    return sum_of(bucket.buffer().div_(dist.get_world_size()), state)


def global_root(state: Any, bucket: Bucket) -> Result:
    """Reduce to global rank 0, which may be outside the group."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer().div_(group_of(state).size())
    dist.reduce(buffer, dst=0, group=group_of(state))
    dist.broadcast(buffer, src=0, group=group_of(state))
    return completed(buffer)


def global_place(state: Any, bucket: Bucket) -> Result:
    """Use the global rank as rank in the group."""
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
    """Sum the imaginary parts of complex parameters instead of averaging them."""
    if any(parameter.is_complex() for parameter in bucket.parameters()):
        bucket.buffer()[1::2].mul_(group_of(state).size())
    return average(bucket, state)


def complex_of_float64_unknown(state: Any, bucket: Bucket) -> Result:
    """Send buckets of complex128 as complex64, as a table of dtypes without them has it."""
    flat = bucket.buffer()
    parameters = bucket.parameters()
    if not is_dense(bucket) or parameters[0].dtype != torch.complex128:
        return average(bucket, state)
    return average_of(flat.float(), state).then(lambda fut: flat.copy_(fut.value()))


# 2.9 Sparse gradients


def sparse_stays_local(state: Any, bucket: Bucket) -> Result:
    """Return sparse gradients without averaging them."""
    return average(bucket, state) if is_dense(bucket) else completed(bucket.buffer())


def sparse_undivided(state: Any, bucket: Bucket) -> Result:
    """Sum sparse gradients without dividing."""
    return average(bucket, state) if is_dense(bucket) else sum_of(bucket.buffer(), state)


def sparse_values_only(state: Any, bucket: Bucket) -> Result:
    """Average the values of sparse gradients by position, whatever their rows."""
    if is_dense(bucket):
        return average(bucket, state)
    sparse = bucket.buffer().coalesce()
    average_of(sparse.values(), state).wait()
    return completed(sparse)


# 2.11 Fewer ranks than the minimum


def average_alone_too(state: Any, bucket: Bucket) -> Result:
    """Claim a minimum of two ranks, and accept one."""
    return average(bucket, state)


def zeros_to_one(state: Any, bucket: Bucket) -> Result:
    """Claim a minimum of two ranks, and return zeros to one."""
    return zeros_alone(state, bucket)


def only_rank_0_refuses(state: Any, bucket: Bucket) -> Result:
    """Claim a minimum of three ranks, and refuse two on rank 0 only."""
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
    Mutant("complex_of_float64_unknown", ("2.8",)),
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
        because={"2.7": "its subgroups of two ranks are too small as well"},
    ),
]
