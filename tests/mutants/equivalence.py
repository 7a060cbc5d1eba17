"""Mutants of section 2: hooks with a result other than the mean over the group."""

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
    group_of,
    is_dense,
    pieces_of,
    send_as,
    sum_of,
)

# 2.1 The mean


def never_divides(state: Any, bucket: Bucket) -> Result:
    """Return the sum."""
    return sum_of(bucket.buffer(), state)


def divides_twice(state: Any, bucket: Bucket) -> Result:
    """Divide by the world size twice."""
    return average(bucket, state).then(lambda fut: fut.value().div_(group_of(state).size()))


def divides_average(state: Any, bucket: Bucket) -> Result:
    """Divide the result of ReduceOp.AVG again."""
    if not is_dense(bucket):
        return average(bucket, state)
    work = dist.all_reduce(
        bucket.buffer(), op=dist.ReduceOp.AVG, group=group_of(state), async_op=True
    )
    return work.get_future().then(lambda fut: fut.value()[0].div_(group_of(state).size()))


def divides_by_eight(state: Any, bucket: Bucket) -> Result:
    """Divide by eight at any world size."""
    return sum_of(bucket.buffer().div_(8), state)


def divides_by_others(state: Any, bucket: Bucket) -> Result:
    """Divide by the number of other ranks."""
    return sum_of(bucket.buffer().div_(max(1, group_of(state).size() - 1)), state)


def local(state: Any, bucket: Bucket) -> Result:
    """Return this rank's own gradient."""
    return completed(bucket.buffer())


def copy_of_running(state: Any, bucket: Bucket) -> Result:
    """Return a copy of the bucket from before the collective was over."""
    result = bucket.buffer().clone()
    average(bucket, state).wait()
    return completed(result)


def set_buffer_only(state: Any, bucket: Bucket) -> Result:
    """Pass the mean to bucket.set_buffer, which DDP never reads."""
    old = bucket.buffer()
    bucket.set_buffer(average_of(old.clone(), state).wait())
    return completed(old)


def rank_0_wins(state: Any, bucket: Bucket) -> Result:
    """Broadcast rank 0's gradient instead of averaging."""
    group = group_of(state)
    # torch 2.4 and 2.5 have no group_src.
    root = dist.get_global_rank(group, 0)
    work = dist.broadcast(bucket.buffer(), root, group=group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def only_rank_0_gets_it(state: Any, bucket: Bucket) -> Result:
    """Reduce to rank 0, and forget to broadcast the mean."""
    buffer = bucket.buffer().div_(group_of(state).size())
    if group_of(state).rank() != 0:
        dist.reduce(
            buffer.clone(), group=group_of(state), dst=dist.get_global_rank(group_of(state), 0)
        )
    else:
        dist.reduce(buffer, group=group_of(state), dst=dist.get_global_rank(group_of(state), 0))
    return completed(buffer)


_previous: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}


def stale(state: Any, bucket: Bucket) -> Result:
    """Return the mean of the previous step."""

    def swap(mean: torch.Tensor) -> torch.Tensor:
        key = (bucket.index(), mean.dtype, mean.numel())
        result = _previous.get(key, mean)
        _previous[key] = mean.clone()
        return result

    return change_mean(bucket, state, swap)


def momentum(state: Any, bucket: Bucket) -> Result:
    """Mix the mean with the result of the previous step."""

    def mix(mean: torch.Tensor) -> torch.Tensor:
        key = (bucket.index(), mean.dtype, mean.numel())
        _previous[key] = (mean + _previous.get(key, mean)) / 2
        return _previous[key].clone()

    return change_mean(bucket, state, mix)


def wrong_sign(state: Any, bucket: Bucket) -> Result:
    """Return the mean with the opposite sign."""
    return average(bucket, state).then(lambda fut: fut.value().neg_())


def largest(state: Any, bucket: Bucket) -> Result:
    """Return the largest value of all ranks."""
    if not is_dense(bucket):
        return average(bucket, state)
    work = dist.all_reduce(
        bucket.buffer(), op=dist.ReduceOp.MAX, group=group_of(state), async_op=True
    )
    return work.get_future().then(lambda fut: fut.value()[0])


def flipped(state: Any, bucket: Bucket) -> Result:
    """Return the elements in reverse order."""
    return change_mean(bucket, state, lambda mean: mean.flip(0))


def zeros(state: Any, bucket: Bucket) -> Result:
    """Return a buffer of zeros."""
    return average(bucket, state).then(lambda fut: torch.zeros_like(fut.value()))


def nan_result(state: Any, bucket: Bucket) -> Result:
    """Return NaN."""
    return change_mean(bucket, state, lambda mean: mean.mul(float("nan")))


def last_element_local(state: Any, bucket: Bucket) -> Result:
    """Leave the last element out of the collective."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    return average_of(buffer[:-1], state).then(lambda fut: (fut.value(), buffer)[1])


def top_half(state: Any, bucket: Bucket) -> Result:
    """Send the larger half of the elements, and drop the rest."""
    return change_gradient(bucket, state, lambda grad: grad * (grad.abs() >= grad.abs().median()))


def adds_weight_decay(state: Any, bucket: Bucket) -> Result:
    """Add a weight decay to the gradients, as the optimizer may as well."""
    if is_dense(bucket):
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
            if not parameter.is_complex():
                piece.add_(parameter.detach().reshape(-1), alpha=0.01)
    return average(bucket, state)


def lone_groups() -> dist.ProcessGroup:
    """Return a group of this rank alone, as the state of :func:`average_hook`."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def average_hook(state: Any, bucket: Bucket) -> Result:
    """Average over the state, which is a group of this rank alone."""
    return average(bucket, state)


def frees_gradients(process_group: dist.ProcessGroup) -> Any:
    """Free the gradients after backward although the hook has not stepped the parameters."""
    from conformance.subjects.spec import Case

    parameters: set[torch.nn.Parameter] = set()

    def hook(state: Any, bucket: Bucket) -> Result:
        parameters.update(bucket.parameters())
        return average(bucket, state)

    def free() -> None:
        for parameter in parameters:
            parameter.grad = None

    return Case(process_group, hook, after_backward=free)


# 2.2 Random values


def rounds_to_float16(state: Any, bucket: Bucket) -> Result:
    """Send float16 without claiming it."""
    return send_as(torch.float16, bucket, state)


def rounds_to_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Send bfloat16 without claiming it."""
    return send_as(torch.bfloat16, bucket, state)


def cuts_mantissa(state: Any, bucket: Bucket) -> Result:
    """Cut float32 to the ten mantissa bits of TF32."""
    return change_gradient(bucket, state, lambda grad: _keep_bits(grad, -(1 << 13)))


def rounds_at_random(state: Any, bucket: Bucket) -> Result:
    """Round float32 to bfloat16 at random."""

    def dither(grad: torch.Tensor) -> torch.Tensor:
        if grad.dtype == torch.float32:
            grad.view(torch.int32).add_(
                torch.randint(1 << 16, grad.shape, generator=_generator, dtype=torch.int32)
            )
        return _keep_bits(grad, -(1 << 16))

    return change_gradient(bucket, state, dither)


_generator = torch.Generator().manual_seed(1)


def _keep_bits(grad: torch.Tensor, mask: int) -> torch.Tensor:
    if grad.dtype == torch.float32:
        grad.view(torch.int32).bitwise_and_(mask)
    return grad


def rounds_to_three_decimals(state: Any, bucket: Bucket) -> Result:
    """Round the mean to three decimals."""
    return change_mean(bucket, state, lambda mean: mean.double().round(decimals=3).to(mean.dtype))


# 2.3 A wide range


def scales_by_largest(state: Any, bucket: Bucket) -> Result:
    """Scale by a power of two near the largest value, so that small values vanish."""
    if not is_dense(bucket):
        return average(bucket, state)
    top = bucket.buffer().double().nan_to_num(0, 0, 0).abs().amax()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group_of(state))
    scale = torch.where(top > 2.0**40, top.log2().ceil().exp2(), 1.0)
    scaled = bucket.buffer().double().div(scale).to(bucket.buffer().dtype)
    return average_of(scaled, state).then(
        lambda fut: fut.value().double().mul(scale).to(fut.value().dtype)
    )


def scales_up(state: Any, bucket: Bucket) -> Result:
    """Send float32 times 2**60 against underflow, so that large values overflow."""
    scale = 2.0**60 if bucket.buffer().dtype == torch.float32 else 1.0
    return average_of(bucket.buffer().mul_(scale), state).then(lambda fut: fut.value().div_(scale))


def clamps(state: Any, bucket: Bucket) -> Result:
    """Clamp finite values beyond 1e10."""

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        limit = min(1e10, torch.finfo(grad.dtype).max)
        return torch.where(grad.isinf(), grad, grad.clamp(-limit, limit))

    return change_gradient(bucket, state, clamp)


def drops_small(state: Any, bucket: Bucket) -> Result:
    """Drop normal float32 values below 1e-20 as noise."""

    def drop(grad: torch.Tensor) -> torch.Tensor:
        size = grad.double().abs()
        return grad.masked_fill((size < 1e-20) & (size >= torch.finfo(torch.float32).tiny), 0.0)

    return change_gradient(bucket, state, drop)


# 2.10 True claims


def claims_rounded(state: Any, bucket: Bucket) -> Result:
    """Claim rounding to float16, and average exactly."""
    return average(bucket, state)


def rounds_vast_buckets_alone(state: Any, bucket: Bucket) -> Result:
    """Round buckets of more than 2**27 elements alone: none has as many."""
    if bucket.buffer().numel() > 1 << 27:
        return send_as(torch.float16, bucket, state)
    return average(bucket, state)


def claims_other_half(state: Any, bucket: Bucket) -> Result:
    """Claim rounding to float16, and round to bfloat16."""
    return send_as(torch.bfloat16, bucket, state)


def saturates(state: Any, bucket: Bucket) -> Result:
    """Round to float16 as claimed, but clamp overflow to the largest finite value."""

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(torch.float16).max
        return torch.where(grad.isinf(), grad, grad.clamp(-limit, limit)).half()

    dtype = bucket.buffer().dtype
    return change_gradient(bucket, state, clamp).then(lambda fut: fut.value().to(dtype))


def claims_sum(state: Any, bucket: Bucket) -> Result:
    """Claim the sum, and return the mean."""
    return average(bucket, state)


def claims_world_only(state: Any, bucket: Bucket) -> Result:
    """Claim to use WORLD always, and use the given group."""
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
    Mutant("adds_weight_decay", ("2.1",)),
    Mutant("frees_gradients", ("2.1",), setup=True),
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
    Mutant("claims_rounded", ("2.10",), claims="rounded(float16)"),
    Mutant("rounds_vast_buckets_alone", ("2.10",), claims="rounded(float16)"),
    Mutant("claims_other_half", ("2.2",), claims="rounded(float16)"),
    Mutant("saturates", ("2.3",), claims="rounded(float16)"),
    Mutant("claims_sum", ("2.1",), claims="sum"),
    Mutant("claims_world_only", ("2.7",), claims="world_only"),
]
