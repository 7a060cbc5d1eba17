"""Section 1 of the rule book: hooks that break the contract with DDP."""

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
    """Calls its second parameter grad_bucket."""
    return average(grad_bucket, state)


def wrong_bucket_annotation(state: Any, bucket: torch.Tensor) -> Result:
    """Annotates the bucket as a tensor."""
    return average(bucket, state)


def string_annotation(state: Any, bucket: "dist.GradBucket") -> Result:
    """Annotates the bucket with a string, as `from __future__ import annotations` makes all of them."""
    return average(bucket, state)


def wrong_return_annotation(state: Any, bucket: Bucket) -> torch.Tensor:
    """Says that it returns a tensor, though it returns a future of one."""
    return average(bucket, state)


def bare_return_annotation(state: Any, bucket: Bucket) -> torch.futures.Future:
    """Says that it returns a future, but not of what."""
    return average(bucket, state)


def registers_no_callable() -> tuple[None, int]:
    """A set-up that hands over a number where the hook should be."""
    return None, 5


# 1.2 The kind of result


def returns_none(state: Any, bucket: Bucket) -> Result:
    """Forgets its return statement."""
    average(bucket, state)


def returns_tensor(state: Any, bucket: Bucket) -> Result:
    """Returns the mean itself instead of a future of it."""
    return average(bucket, state).wait()


def returns_work(state: Any, bucket: Bucket) -> Result:
    """Returns the handle of the collective."""
    return dist.all_reduce(
        bucket.buffer().div_(group_of(state).size()), group=group_of(state), async_op=True
    )


async def returns_coroutine(state: Any, bucket: Bucket) -> Result:
    """Is an async function, which DDP does not await."""
    return average(bucket, state)


def returns_concurrent_future(state: Any, bucket: Bucket) -> Result:
    """Returns a future of concurrent.futures."""
    future = concurrent.futures.Future()
    future.set_result(average(bucket, state).wait())
    return future


def returns_integer(state: Any, bucket: Bucket) -> Result:
    """Returns a status code."""
    average(bucket, state).wait()
    return 0


def future_of_collective(state: Any, bucket: Bucket) -> Result:
    """Returns the future of the collective as it is: it holds a list, not a tensor."""
    return dist.all_reduce(
        bucket.buffer().div_(group_of(state).size()), group=group_of(state), async_op=True
    ).get_future()


def future_of_list(state: Any, bucket: Bucket) -> Result:
    """Returns a future of a list of one tensor, as hooks did before torch 1.9."""
    return average(bucket, state).then(lambda fut: [fut.value()])


def future_of_tuple(state: Any, bucket: Bucket) -> Result:
    """Returns a future of the mean and its norm."""
    return average(bucket, state).then(lambda fut: (fut.value(), fut.value().norm()))


def future_of_none(state: Any, bucket: Bucket) -> Result:
    """Its callback works in place and returns nothing."""
    return average(bucket, state).then(lambda fut: None)


def future_of_future(state: Any, bucket: Bucket) -> Result:
    """Its callback returns another future, which is not chained."""
    return average(bucket, state).then(lambda fut: completed(fut.value()))


def future_of_array(state: Any, bucket: Bucket) -> Result:
    """Returns a future of a NumPy array."""
    return average(bucket, state).then(lambda fut: fut.value().numpy())


# 1.3 Size, shape and memory of the result


def row_of_gather(state: Any, bucket: Bucket) -> Result:
    """Returns the second row of a larger tensor: torch reads from the start of the storage."""
    return change_mean(bucket, state, lambda mean: torch.stack([torch.zeros_like(mean), mean])[1])


def strided_result(state: Any, bucket: Bucket) -> Result:
    """Returns every second element of a tensor: torch reads the elements between them too."""
    return change_mean(
        bucket, state, lambda mean: torch.stack([mean, torch.zeros_like(mean)], dim=1)[:, 0]
    )


def expanded_result(state: Any, bucket: Bucket) -> Result:
    """Returns one element expanded to the bucket's size."""
    return change_mean(bucket, state, lambda mean: mean[:1].clone().expand(mean.numel()))


def longer_result(state: Any, bucket: Bucket) -> Result:
    """Returns the mean with its padding still on."""
    return change_mean(bucket, state, lambda mean: torch.cat([mean, mean.new_zeros(3)]))


def shorter_view(state: Any, bucket: Bucket) -> Result:
    """Returns a view that lacks the last element, though the storage has it."""
    return change_mean(bucket, state, lambda mean: mean[:-1])


def shorter_result(state: Any, bucket: Bucket) -> Result:
    """Returns a tensor that lacks the last element."""
    return change_mean(bucket, state, lambda mean: mean[:-1].clone())


def scalar_result(state: Any, bucket: Bucket) -> Result:
    """Returns the mean of all elements as a scalar."""
    return change_mean(bucket, state, lambda mean: mean.mean())


def empty_result(state: Any, bucket: Bucket) -> Result:
    """Returns an empty tensor."""
    return change_mean(bucket, state, lambda mean: mean.new_empty(0))


def matrix_result(state: Any, bucket: Bucket) -> Result:
    """Returns a matrix of one row."""
    return change_mean(bucket, state, lambda mean: mean.view(1, -1))


# 1.4 Dtype, device and layout of the result


def double_result(state: Any, bucket: Bucket) -> Result:
    """Returns float64, whatever the bucket's dtype."""
    return change_mean(bucket, state, lambda mean: mean.double())


def half_result(state: Any, bucket: Bucket) -> Result:
    """Returns float16: forgets to decompress."""
    return change_mean(bucket, state, lambda mean: mean.half())


def float_result_of_half(state: Any, bucket: Bucket) -> Result:
    """Returns float32, in which it has added, for a bucket of float16 or bfloat16 too."""
    halves = bucket.buffer().dtype in (torch.float16, torch.bfloat16)
    return average_of(bucket.buffer().float(), state) if halves else average(bucket, state)


def nothing_of_double(state: Any, bucket: Bucket) -> Result:
    """Has forgotten what to return where a bucket is float64."""
    return None if bucket.buffer().dtype == torch.float64 else average(bucket, state)  # type: ignore[return-value]


def shorter_view_of_half(state: Any, bucket: Bucket) -> Result:
    """Returns all but the last element of a float16 bucket."""
    return change_mean(
        bucket, state, lambda mean: mean[:-1] if mean.dtype == torch.float16 else mean
    )


def integer_result(state: Any, bucket: Bucket) -> Result:
    """Returns int64, which cuts off the fractions."""
    return change_mean(bucket, state, lambda mean: mean.long())


def complex_result(state: Any, bucket: Bucket) -> Result:
    """Returns complex numbers, as an inverse Fourier transform does."""
    return change_mean(
        bucket,
        state,
        lambda mean: mean.to(torch.complex128 if mean.dtype == torch.float64 else torch.complex64),
    )


def meta_result(state: Any, bucket: Bucket) -> Result:
    """Returns a tensor on the meta device, which holds no data."""
    return change_mean(bucket, state, lambda mean: mean.to("meta"))


def sparse_result(state: Any, bucket: Bucket) -> Result:
    """Returns a sparse tensor for a dense bucket."""
    return change_mean(bucket, state, lambda mean: mean.to_sparse())


# 1.6 Final when completed, and a buffer of its own

_running: list[dist.Work] = []
_scratch: dict[Any, torch.Tensor] = {}


def completes_early(state: Any, bucket: Bucket) -> Result:
    """Completes every future at once; only the step's last call waits for the collectives."""
    buffer = bucket.buffer().div_(group_of(state).size())
    _running.append(dist.all_reduce(buffer, group=group_of(state), async_op=True))
    if bucket.is_last():
        for work in _running:
            work.wait()
        _running.clear()
    return completed(buffer)


def _average_in_scratch(bucket: Bucket, state: Any, key: Any) -> Result:
    """Average into the scratch buffer of that key, grown to the largest bucket seen."""
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, state)
    if key not in _scratch or _scratch[key].numel() < buffer.numel():
        _scratch[key] = torch.empty_like(buffer)
    return average_of(_scratch[key][: buffer.numel()].copy_(buffer), state)


def one_scratch_buffer(state: Any, bucket: Bucket) -> Result:
    """Keeps one result buffer per dtype for all buckets."""
    return _average_in_scratch(bucket, state, bucket.buffer().dtype)


def two_scratch_buffers(state: Any, bucket: Bucket) -> Result:
    """Takes turns with two result buffers per dtype: the third bucket overwrites the first."""
    return _average_in_scratch(bucket, state, (bucket.buffer().dtype, bucket.index() % 2))


def scratch_by_size(state: Any, bucket: Bucket) -> Result:
    """Keeps a result buffer for each size that a bucket may have: two buckets of one size have one among them."""
    return _average_in_scratch(bucket, state, (bucket.buffer().dtype, bucket.buffer().numel()))


# 1.7 Every step as the first


def sums_from_step_10(state: Any, bucket: Bucket) -> Result:
    """Divides in the first ten steps only."""
    return average(bucket, state) if step_number(bucket) < 10 else sum_of(bucket.buffer(), state)


def zeros_at_step_11(state: Any, bucket: Bucket) -> Result:
    """Gives zeros at step 11, where its schedule divides a remainder of zero."""
    step = step_number(bucket)
    return change_mean(bucket, state, lambda mean: mean * (step % 12 != 11))


def raises_at_step_10(state: Any, bucket: Bucket) -> Result:
    """Raises at step 10, beyond the end of a table with one entry per step."""
    return completed(average(bucket, state).wait() * ([1] * 10)[step_number(bucket)])


# 1.8 Any number of buckets


def only_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Averages the bucket with index 0 and leaves the others local."""
    return average(bucket, state) if bucket.index() == 0 else completed(bucket.buffer())


def vectors_side_by_side(state: Any, bucket: Bucket) -> Result:
    """Averages vectors together and each matrix by itself: a bucket without a vector has nothing to put together."""
    if not is_dense(bucket) or any(parameter.is_complex() for parameter in bucket.parameters()):
        return average(bucket, state)
    pieces = list(zip(bucket.parameters(), pieces_of(bucket), strict=True))
    vectors = [piece for parameter, piece in pieces if parameter.dim() < 2]
    together = average_of(torch.stack([vector.sum() for vector in vectors]), state)
    together.wait()
    return average(bucket, state)


def divides_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Divides the bucket with index 0 and sums the others."""
    return average(bucket, state) if bucket.index() == 0 else sum_of(bucket.buffer(), state)


def last_of_several_undivided(state: Any, bucket: Bucket) -> Result:
    """Right in all buckets but the last of several, which it forgets to divide."""
    forgotten = bucket.is_last() and bucket.index() > 0
    return sum_of(bucket.buffer(), state) if forgotten else average(bucket, state)


_seen = {"buckets": 0, "calls": 0}


def counts_calls(state: Any, bucket: Bucket) -> Result:
    """Counts the calls of the first step, and divides no more buckets than that in a step."""
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
    """Keys its scratch buffer by bucket index, with no look at the size: rebuilt buckets do not fit."""
    if not is_dense(bucket):
        return average(bucket, state)
    scratch = _scratch.setdefault(
        (bucket.index(), bucket.buffer().dtype), torch.empty_like(bucket.buffer())
    )
    return average_of(scratch.copy_(bucket.buffer()), state)


_parked: list[tuple[torch.Tensor, Result]] = []


def reversed_order_on_rank_1(state: Any, bucket: Bucket) -> Result:
    """Issues the step's collectives at its end, on rank 1 in the reverse order."""
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
    """Scales each bucket by a power of two, keeps by which in one place for all, and scales back when the last one is there."""
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
    """A set-up that registers its hook on rank 0 alone; the others run DDP's own allreduce."""
    if rank == 0:
        model.register_comm_hook(process_group, average_hook)


def registers_nothing(model: Any) -> None:
    """A set-up that forgets to register its hook."""


def registers_and_returns(model: Any, process_group: Any) -> tuple[Any, Any]:
    """A set-up that registers its hook, and returns it to be registered once more."""
    model.register_comm_hook(process_group, average_hook)
    return process_group, average_hook


# 1.10 The bucket, not p.grad


def divides_p_grad_too(state: Any, bucket: Bucket) -> Result:
    """Divides p.grad beside the bucket: with gradient_as_bucket_view they are the same memory."""
    for parameter in bucket.parameters() if is_dense(bucket) else ():
        parameter.grad.div_(group_of(state).size())
    return average(bucket, state)


def clears_p_grad(state: Any, bucket: Bucket) -> Result:
    """Sets p.grad to zero to save memory: with gradient_as_bucket_view that is the bucket."""
    for parameter in bucket.parameters() if is_dense(bucket) else ():
        parameter.grad.zero_()
    return average(bucket, state)


def averages_p_grad(state: Any, bucket: Bucket) -> Result:
    """Averages p.grad in place and returns the bucket as it was: right only with gradient_as_bucket_view."""
    for parameter in bucket.parameters():
        average_of(parameter.grad, state).wait()
    return completed(bucket.buffer())


# 1.11 A name


class Nameless:
    """A callable object, which has no __name__; the hook itself is right."""

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
_breaks_ordered = {
    "1.6": "it is judged with several buckets too, and no run with several comes to its end"
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
        because={"4.1": "DDP hands a rank that has left a parameter out what the future held"},
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
        because={"1.8": "of two buckets of one size the first holds the second's mean"},
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
