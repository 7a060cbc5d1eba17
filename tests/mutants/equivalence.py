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
    group_of,
    is_dense,
    pieces_of,
    send_as,
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
    work = dist.all_reduce(
        bucket.buffer(), op=dist.ReduceOp.AVG, group=group_of(state), async_op=True
    )
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


_previous: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}


def stale(state: Any, bucket: Bucket) -> Result:
    """Returns the mean of the step before."""

    def swap(mean: torch.Tensor) -> torch.Tensor:
        key = (bucket.index(), mean.dtype, mean.numel())
        result, _previous[key] = _previous.get(key, mean), mean.clone()
        return result

    return change_mean(bucket, state, swap)


def momentum(state: Any, bucket: Bucket) -> Result:
    """Mixes the mean with the one of the step before."""

    def mix(mean: torch.Tensor) -> torch.Tensor:
        key = (bucket.index(), mean.dtype, mean.numel())
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
    work = dist.all_reduce(
        bucket.buffer(), op=dist.ReduceOp.MAX, group=group_of(state), async_op=True
    )
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


def adds_weight_decay(state: Any, bucket: Bucket) -> Result:
    """Adds a weight decay to the gradients, as the optimizer may as well."""
    if is_dense(bucket):
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
            if not parameter.is_complex():
                piece.add_(parameter.detach().reshape(-1), alpha=0.01)
    return average(bucket, state)


def lone_groups() -> dist.ProcessGroup:
    """A state that goes with :func:`average_hook`: for each rank a group of its own."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def average_hook(state: Any, bucket: Bucket) -> Result:
    """Right, but given a group of this rank alone as its state."""
    return average(bucket, state)


def frees_gradients(process_group: dist.ProcessGroup) -> Any:
    """A set-up that frees the gradients when backward is over, as if its hook had stepped the parameters."""
    from conformance.subject import Case

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
    """Sends float16 without saying so."""
    return send_as(torch.float16, bucket, state)


def rounds_to_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Sends bfloat16 without saying so."""
    return send_as(torch.bfloat16, bucket, state)


def cuts_mantissa(state: Any, bucket: Bucket) -> Result:
    """Cuts float32 to the ten bits of mantissa that TF32 has."""
    return change_gradient(bucket, state, lambda grad: _keep_bits(grad, -(1 << 13)))


def rounds_at_random(state: Any, bucket: Bucket) -> Result:
    """Rounds float32 to bfloat16 at random, by a generator of its own."""

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
    return average_of(scaled, state).then(
        lambda fut: fut.value().double().mul(scale).to(fut.value().dtype)
    )


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


# 2.10 True claims


def claims_rounded(state: Any, bucket: Bucket) -> Result:
    """Says that it rounds to float16, and does not."""
    return average(bucket, state)


def claims_other_half(state: Any, bucket: Bucket) -> Result:
    """Says that it rounds to float16, and rounds to bfloat16."""
    return send_as(torch.bfloat16, bucket, state)


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
    Mutant("claims_other_half", ("2.2",), claims="rounded(float16)"),
    Mutant("saturates", ("2.3",), claims="rounded(float16)"),
    Mutant("claims_sum", ("2.1",), claims="sum"),
    Mutant("claims_world_only", ("2.7",), claims="world_only"),
]
