"""Mutants of section 1: hooks that break the contract with DDP."""

import concurrent.futures
import functools
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_hook,
    average_of,
    change_mean,
    completed,
    finish,
    group_of,
    is_dense,
    pieces_of,
    step_number,
    sum_of,
)

# 1.1 Registration


def wrong_parameter_name(state: Any, grad_bucket: Bucket) -> Result:
    """Name the second parameter grad_bucket."""
    return average(grad_bucket, state)


def wrong_bucket_annotation(state: Any, bucket: torch.Tensor) -> Result:
    """Annotate the bucket as a tensor."""
    return average(bucket, state)


def string_annotation(state: Any, bucket: "dist.GradBucket") -> Result:
    """Annotate the bucket with a string, as `from __future__ import annotations` does."""
    return average(bucket, state)


def wrong_return_annotation(state: Any, bucket: Bucket) -> torch.Tensor:
    """Annotate the result as a tensor instead of a future."""
    return average(bucket, state)


def bare_return_annotation(state: Any, bucket: Bucket) -> torch.futures.Future:
    """Annotate the result as a future without its type of value."""
    return average(bucket, state)


def registers_no_callable() -> tuple[None, int]:
    """Return a number in place of the hook from the set-up."""
    return None, 5


# 1.2 The kind of result


def returns_none(state: Any, bucket: Bucket) -> Result:
    """Forget the return statement."""
    average(bucket, state)


def returns_tensor(state: Any, bucket: Bucket) -> Result:
    """Return the mean itself instead of a future."""
    return average(bucket, state).wait()


def returns_work(state: Any, bucket: Bucket) -> Result:
    """Return the handle of the collective instead of a future."""
    return dist.all_reduce(
        bucket.buffer().div_(group_of(state).size()), group=group_of(state), async_op=True
    )


async def returns_coroutine(state: Any, bucket: Bucket) -> Result:
    """Return a coroutine, which DDP does not await."""
    return average(bucket, state)


def returns_concurrent_future(state: Any, bucket: Bucket) -> Result:
    """Return a future of concurrent.futures."""
    future = concurrent.futures.Future()
    future.set_result(average(bucket, state).wait())
    return future


def returns_integer(state: Any, bucket: Bucket) -> Result:
    """Return a status code."""
    average(bucket, state).wait()
    return 0


def future_of_collective(state: Any, bucket: Bucket) -> Result:
    """Return the collective's own future, which holds a list."""
    return dist.all_reduce(
        bucket.buffer().div_(group_of(state).size()), group=group_of(state), async_op=True
    ).get_future()


def future_of_list(state: Any, bucket: Bucket) -> Result:
    """Return a future of a list of one tensor, as hooks did before torch 1.9."""
    return average(bucket, state).then(lambda fut: [fut.value()])


def future_of_tuple(state: Any, bucket: Bucket) -> Result:
    """Return a future of the mean and its norm."""
    return average(bucket, state).then(lambda fut: (fut.value(), fut.value().norm()))


def future_of_none(state: Any, bucket: Bucket) -> Result:
    """Return nothing from the callback."""
    return average(bucket, state).then(lambda fut: None)


def future_of_future(state: Any, bucket: Bucket) -> Result:
    """Return an unchained future from the callback."""
    return average(bucket, state).then(lambda fut: completed(fut.value()))


def future_of_array(state: Any, bucket: Bucket) -> Result:
    """Return a future of a NumPy array."""
    return average(bucket, state).then(lambda fut: fut.value().numpy())


# 1.3 Size, shape and memory of the result


def row_of_gather(state: Any, bucket: Bucket) -> Result:
    """Return the second row of a larger tensor; torch reads from the start of its storage."""
    return change_mean(bucket, state, lambda mean: torch.stack([torch.zeros_like(mean), mean])[1])


def strided_result(state: Any, bucket: Bucket) -> Result:
    """Return every second element of a tensor; torch reads the others too."""
    return change_mean(
        bucket, state, lambda mean: torch.stack([mean, torch.zeros_like(mean)], dim=1)[:, 0]
    )


def expanded_result(state: Any, bucket: Bucket) -> Result:
    """Return one element expanded to the bucket's size."""
    return change_mean(bucket, state, lambda mean: mean[:1].clone().expand(mean.numel()))


def longer_result(state: Any, bucket: Bucket) -> Result:
    """Return the mean together with its padding."""
    return change_mean(bucket, state, lambda mean: torch.cat([mean, mean.new_zeros(3)]))


def shorter_view(state: Any, bucket: Bucket) -> Result:
    """Return a view without the last element, which the storage has."""
    return change_mean(bucket, state, lambda mean: mean[:-1])


def shorter_result(state: Any, bucket: Bucket) -> Result:
    """Return a tensor without the last element."""
    return change_mean(bucket, state, lambda mean: mean[:-1].clone())


def scalar_result(state: Any, bucket: Bucket) -> Result:
    """Return the mean of all elements as a scalar."""
    return change_mean(bucket, state, lambda mean: mean.mean())


def empty_result(state: Any, bucket: Bucket) -> Result:
    """Return an empty tensor."""
    return change_mean(bucket, state, lambda mean: mean.new_empty(0))


def matrix_result(state: Any, bucket: Bucket) -> Result:
    """Return a matrix of one row."""
    return change_mean(bucket, state, lambda mean: mean.view(1, -1))


# 1.4 Dtype, device and layout of the result


def double_result(state: Any, bucket: Bucket) -> Result:
    """Return float64 for every dtype of bucket."""
    return change_mean(bucket, state, lambda mean: mean.double())


def half_result(state: Any, bucket: Bucket) -> Result:
    """Return float16 instead of the bucket's dtype."""
    return change_mean(bucket, state, lambda mean: mean.half())


def float_result_of_half(state: Any, bucket: Bucket) -> Result:
    """Return float32, the dtype of the sum, for buckets in half precision."""
    halves = bucket.buffer().dtype in (torch.float16, torch.bfloat16)
    return average_of(bucket.buffer().float(), state) if halves else average(bucket, state)


def nothing_of_double(state: Any, bucket: Bucket) -> Result:
    """Return nothing for float64 buckets."""
    return None if bucket.buffer().dtype == torch.float64 else average(bucket, state)  # type: ignore[return-value]


def shorter_view_of_half(state: Any, bucket: Bucket) -> Result:
    """Return a view without the last element for float16 buckets."""
    return change_mean(
        bucket, state, lambda mean: mean[:-1] if mean.dtype == torch.float16 else mean
    )


def integer_result(state: Any, bucket: Bucket) -> Result:
    """Return int64, which drops the fractions."""
    return change_mean(bucket, state, lambda mean: mean.long())


def complex_result(state: Any, bucket: Bucket) -> Result:
    """Return complex numbers, as an inverse Fourier transform does."""
    return change_mean(
        bucket,
        state,
        lambda mean: mean.to(torch.complex128 if mean.dtype == torch.float64 else torch.complex64),
    )


def meta_result(state: Any, bucket: Bucket) -> Result:
    """Return a tensor on the meta device, which holds no data."""
    return change_mean(bucket, state, lambda mean: mean.to("meta"))


def sparse_result(state: Any, bucket: Bucket) -> Result:
    """Return a sparse tensor for a dense bucket."""
    return change_mean(bucket, state, lambda mean: mean.to_sparse())


# 1.6 Final when completed, and a buffer of its own

_running: list[dist.Work] = []
_scratch: dict[Any, torch.Tensor] = {}


def completes_early(state: Any, bucket: Bucket) -> Result:
    """Complete every future at once, and wait for all collectives in the last bucket."""
    buffer = bucket.buffer().div_(group_of(state).size())
    _running.append(dist.all_reduce(buffer, group=group_of(state), async_op=True))
    if bucket.is_last():
        for work in _running:
            work.wait()
        _running.clear()
    return completed(buffer)


def _average_in_scratch(bucket: Bucket, state: Any, key: Any) -> Result:
    """Average in the scratch buffer of ``key``, grown to the largest bucket so far."""
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, state)
    if key not in _scratch or _scratch[key].numel() < buffer.numel():
        _scratch[key] = torch.empty_like(buffer)
    return average_of(_scratch[key][: buffer.numel()].copy_(buffer), state)


def one_scratch_buffer(state: Any, bucket: Bucket) -> Result:
    """Share one result buffer among all buckets of a dtype."""
    return _average_in_scratch(bucket, state, bucket.buffer().dtype)


def two_scratch_buffers(state: Any, bucket: Bucket) -> Result:
    """Alternate two result buffers, so that the third bucket overwrites the first."""
    return _average_in_scratch(bucket, state, (bucket.buffer().dtype, bucket.index() % 2))


def scratch_by_size(state: Any, bucket: Bucket) -> Result:
    """Share one result buffer among all buckets of a size."""
    return _average_in_scratch(bucket, state, (bucket.buffer().dtype, bucket.buffer().numel()))


# 1.7 Every step as the first


def sums_from_step_10(state: Any, bucket: Bucket) -> Result:
    """Return the sum from step 10 on."""
    return average(bucket, state) if step_number(bucket) < 10 else sum_of(bucket.buffer(), state)


def zeros_at_step_11(state: Any, bucket: Bucket) -> Result:
    """Return zeros at step 11."""
    step = step_number(bucket)
    return change_mean(bucket, state, lambda mean: mean * (step % 12 != 11))


def raises_at_step_10(state: Any, bucket: Bucket) -> Result:
    """Raise at step 10, beyond the end of a table with one entry per step."""
    return completed(average(bucket, state).wait() * ([1] * 10)[step_number(bucket)])


# 1.8 Any number of buckets


def only_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Average the first bucket of a step only."""
    return average(bucket, state) if bucket.index() == 0 else completed(bucket.buffer())


def vectors_side_by_side(state: Any, bucket: Bucket) -> Result:
    """Stack the vectors of a bucket, which fails if it has none."""
    if not is_dense(bucket) or any(parameter.is_complex() for parameter in bucket.parameters()):
        return average(bucket, state)
    pieces = list(zip(bucket.parameters(), pieces_of(bucket), strict=True))
    vectors = [piece for parameter, piece in pieces if parameter.dim() < 2]
    together = average_of(torch.stack([vector.sum() for vector in vectors]), state)
    together.wait()
    return average(bucket, state)


def divides_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Divide the first bucket of a step only."""
    return average(bucket, state) if bucket.index() == 0 else sum_of(bucket.buffer(), state)


def last_of_several_undivided(state: Any, bucket: Bucket) -> Result:
    """Forget to divide the last of several buckets."""
    forgotten = bucket.is_last() and bucket.index() > 0
    return sum_of(bucket.buffer(), state) if forgotten else average(bucket, state)


_seen = {"buckets": 0, "calls": 0}


def counts_calls(state: Any, bucket: Bucket) -> Result:
    """Count the buckets of the first step, and never divide more of them in a step."""
    _seen["calls"] += 1
    future = (
        average(bucket, state)
        if _seen["calls"] <= (_seen["buckets"] or 1)
        else sum_of(bucket.buffer(), state)
    )
    if bucket.is_last():
        _seen.update(buckets=_seen["buckets"] or _seen["calls"], calls=0)
    return future


def scratch_by_index(state: Any, bucket: Bucket) -> Result:
    """Keep a scratch buffer per bucket index, whose size is wrong after a rebuild."""
    if not is_dense(bucket):
        return average(bucket, state)
    scratch = _scratch.setdefault(
        (bucket.index(), bucket.buffer().dtype), torch.empty_like(bucket.buffer())
    )
    return average_of(scratch.copy_(bucket.buffer()), state)


_parked: list[tuple[torch.Tensor, Result]] = []


def reversed_order_on_rank_1(state: Any, bucket: Bucket) -> Result:
    """Issue a step's collectives at its end, and in reverse order on rank 1."""
    future = torch.futures.Future()
    _parked.append((bucket.buffer().div_(group_of(state).size()), future))
    if bucket.is_last():
        for buffer, parked in reversed(_parked) if group_of(state).rank() == 1 else _parked:
            collective = dist.all_reduce(buffer, group=group_of(state), async_op=True).get_future()
            collective.add_done_callback(lambda fut, parked=parked: finish(parked, fut))
        _parked.clear()
    return future


_scale: list[float] = [1.0]
_pending: list[tuple[Result, Result]] = []


def scale_of_last_bucket(state: Any, bucket: Bucket) -> Result:
    """Scale all buckets back by the scale of the last one.

    Each bucket is scaled by a power of two of its own, but the scale is kept in one place.
    """
    _scale[0] = 2.0 ** (bucket.index() + 1)
    result = torch.futures.Future()
    _pending.append((average_of(bucket.buffer().mul_(_scale[0]), state), result))
    if bucket.is_last():
        for mean, one in _pending:
            mean.then(functools.partial(_scale_back, one))
        _pending.clear()
    return result


def _scale_back(result: Result, mean: Result) -> None:
    try:
        result.set_result(mean.value().div_(_scale[0]))
    except RuntimeError as error:
        result.set_exception(error)


# 1.9 Registered everywhere


def registers_on_rank_0(model: Any, process_group: Any, rank: int) -> None:
    """Register the hook on rank 0 only; the others run DDP's own allreduce."""
    if rank == 0:
        model.register_comm_hook(process_group, average_hook)


def registers_nothing(model: Any) -> None:
    """Forget to register the hook."""


def registers_and_returns(model: Any, process_group: Any) -> tuple[Any, Any]:
    """Register the hook, and return it to be registered again."""
    model.register_comm_hook(process_group, average_hook)
    return process_group, average_hook


# 1.10 The bucket, not p.grad


def divides_p_grad_too(state: Any, bucket: Bucket) -> Result:
    """Divide p.grad too, which is the bucket's memory with gradient_as_bucket_view."""
    for parameter in bucket.parameters() if is_dense(bucket) else ():
        parameter.grad.div_(group_of(state).size())
    return average(bucket, state)


def clears_p_grad(state: Any, bucket: Bucket) -> Result:
    """Clear p.grad to save memory, which clears the bucket with gradient_as_bucket_view."""
    for parameter in bucket.parameters() if is_dense(bucket) else ():
        parameter.grad.zero_()
    return average(bucket, state)


def averages_p_grad(state: Any, bucket: Bucket) -> Result:
    """Average p.grad in place, which is the bucket only with gradient_as_bucket_view."""
    for parameter in bucket.parameters():
        average_of(parameter.grad, state).wait()
    return completed(bucket.buffer())


# 1.11 A name


class Nameless:
    """Average with a callable object that has no __name__."""

    def __call__(self, state: Any, bucket: Bucket) -> Result:
        return average(bucket, state)


nameless = Nameless()
nameless_partial = functools.partial(average_hook)


_rounding = {
    "2.2": "the result is rounded to float16",
    "8.5": "float16 holds no subnormal of float32",
}
_garbage = {
    "2.1": "torch reads the storage from its start without a stride, so the gradients are garbage"
}

MUTANTS = [
    Mutant("wrong_parameter_name", ("1.1",)),
    Mutant("wrong_bucket_annotation", ("1.1",)),
    Mutant("string_annotation", ("1.1",)),
    Mutant("wrong_return_annotation", ("1.1",)),
    Mutant("bare_return_annotation", ("1.1",)),
    Mutant("registers_no_callable", ("1.1",), setup=True),
    Mutant("registers_and_returns", ("1.1",), setup=True),
    Mutant("returns_none", ("1.2",)),
    Mutant("returns_tensor", ("1.2",)),
    Mutant("returns_work", ("1.2",)),
    Mutant("returns_coroutine", ("1.2",)),
    Mutant("returns_concurrent_future", ("1.2",)),
    Mutant("returns_integer", ("1.2",)),
    Mutant("future_of_collective", ("1.2",)),
    Mutant("future_of_list", ("1.2",)),
    Mutant("future_of_tuple", ("1.2",)),
    Mutant("future_of_none", ("1.2",)),
    Mutant("future_of_future", ("1.2",)),
    Mutant("future_of_array", ("1.2",)),
    Mutant("row_of_gather", ("1.3", "2.1"), because=_garbage),
    Mutant("strided_result", ("1.3", "2.1"), because=_garbage),
    Mutant("longer_result", ("1.3",)),
    *(Mutant(name, ("1.3",)) for name in ("shorter_view", "shorter_view_of_half")),
    Mutant("shorter_result", ("1.3",)),
    Mutant("expanded_result", ("1.3",)),
    Mutant("scalar_result", ("1.3",)),
    Mutant("empty_result", ("1.3",)),
    Mutant("matrix_result", ("1.3",)),
    Mutant("sparse_result", ("1.4",)),
    Mutant("double_result", ("1.4",)),
    Mutant("half_result", ("1.4", "2.2", "8.5"), because=_rounding),
    Mutant("float_result_of_half", ("1.4",)),
    Mutant("nothing_of_double", ("2.4",)),
    Mutant("integer_result", ("1.4", "2.1"), because={"2.1": "the fractions are cut off"}),
    Mutant(
        "complex_result",
        ("1.4",),
        because={"4.1": "DDP gives the future's value to a rank that has left a parameter out"},
    ),
    Mutant("meta_result", ("1.4",)),
    Mutant("completes_early", ("1.6",)),
    Mutant(
        "one_scratch_buffer",
        ("1.6", "1.8"),
        because={"1.8": "the buckets that share the buffer hold the last one's mean"},
    ),
    Mutant(
        "scratch_by_size",
        ("1.6", "1.8"),
        because={"1.8": "if two buckets have the same size, the first holds the second's mean"},
    ),
    Mutant(
        "two_scratch_buffers",
        ("1.6", "1.8"),
        because={"1.8": "the buckets that share a buffer hold the last one's mean"},
    ),
    Mutant("sums_from_step_10", ("1.7",)),
    Mutant("zeros_at_step_11", ("1.7",)),
    Mutant("raises_at_step_10", ("1.7",)),
    Mutant("only_first_bucket", ("1.8",)),
    Mutant("vectors_side_by_side", ("1.8",)),
    Mutant("divides_first_bucket", ("1.8",)),
    Mutant("last_of_several_undivided", ("1.8",)),
    Mutant("counts_calls", ("1.8",)),
    Mutant("scratch_by_index", ("1.8",)),
    Mutant("reversed_order_on_rank_1", ("1.8",)),
    Mutant("scale_of_last_bucket", ("1.8",)),
    Mutant("registers_on_rank_0", ("1.9",), setup=True),
    Mutant("registers_nothing", ("1.9",), setup=True),
    Mutant("divides_p_grad_too", ("1.10",)),
    Mutant("clears_p_grad", ("1.10",)),
    Mutant(
        "averages_p_grad",
        ("1.10", "2.1"),
        because={"2.1": "without gradient_as_bucket_view the bucket stays local"},
    ),
    *(Mutant(name, ("1.11",)) for name in ("nameless", "nameless_partial")),
]
