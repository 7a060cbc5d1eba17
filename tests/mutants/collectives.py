"""Mutants of section 10: blocking hooks, and ranks that disagree on collectives.

Their results are right.
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
    call_number,
    completed,
    finish,
    gather,
    group_of,
    is_dense,
    pieces_of,
    sum_of,
)


def waits_for_work(state: Any, bucket: Bucket) -> Result:
    """Wait for the allreduce before returning."""
    buffer = bucket.buffer().div_(group_of(state).size())
    dist.all_reduce(buffer, group=group_of(state))
    return completed(buffer)


def waits_for_future(state: Any, bucket: Bucket) -> Result:
    """Wait for the future before returning it."""
    future = average(bucket, state)
    future.wait()
    return future


def waits_in_last_bucket(state: Any, bucket: Bucket) -> Result:
    """Wait for the largest element of all ranks, for a log, in a step's last bucket."""
    if bucket.is_last():
        dist.all_reduce(torch.ones(()), op=dist.ReduceOp.MAX, group=group_of(state))
    return average(bucket, state)


def _log(state: Any, value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    dist.all_reduce(value, op=op, group=group_of(state), async_op=True)


def logs_another_extreme(state: Any, bucket: Bucket) -> Result:
    """Reduce with MAX on rank 0, and with MIN on the others."""
    if is_dense(bucket) and bucket.buffer().numel():
        _log(
            state,
            bucket.buffer().sum(),
            dist.ReduceOp.MIN if group_of(state).rank() else dist.ReduceOp.MAX,
        )
    return average(bucket, state)


def logs_in_two_dtypes(state: Any, bucket: Bucket) -> Result:
    """Sum a step count as float32 on rank 0, and as int32 on the others."""
    _log(state, torch.ones(1, dtype=torch.int32 if group_of(state).rank() else torch.float32))
    return average(bucket, state)


def logs_from_each_rank(state: Any, bucket: Bucket) -> Result:
    """Broadcast from each rank itself instead of from rank 0."""
    group = group_of(state)
    dist.broadcast(
        torch.ones(1), group=group, src=dist.get_global_rank(group, group.rank()), async_op=True
    )
    return average(bucket, state)


def pads_on_rank_0(state: Any, bucket: Bucket) -> Result:
    """Sum one more element on rank 0."""
    group = group_of(state)
    _log(state, torch.ones(2 + (group.rank() == 0)))
    return average(bucket, state)


_averaged: dict[int, torch.Tensor] = {}


def sums_in_order_of_arrival(state: Any, bucket: Bucket) -> Result:
    """Sum the ranks' gradients in their order of arrival.

    The order is the same on all ranks, but changes from run to run.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    arrivals = dist.PrefixStore("arrivals", dist.distributed_c10d._get_default_store())
    place = arrivals.add(f"{call_number()} {group_of(state).group_name}", 1)
    places = [int(one) for one in gather(torch.tensor([place]), state)]
    grads = [
        grad
        for _, grad in sorted(
            zip(places, gather(bucket.buffer(), state), strict=True), key=lambda pair: pair[0]
        )
    ]
    return completed(sum(grads[1:], grads[0]).div(len(grads)))


def second_callback_before_first(state: Any, bucket: Bucket) -> Result:
    """Attach two callbacks to one future although the second needs the first.

    torch promises no order of callbacks.
    """
    future = sum_of(bucket.buffer(), state)
    number = call_number()
    _averaged[number] = bucket.buffer()
    future.then(lambda fut: _averaged.update({number: fut.value() / group_of(state).size()}))

    def second(done: Result) -> torch.Tensor:
        done.value()
        return _averaged.pop(number)

    return future.then(second)


def second_stage_in_callback(state: Any, bucket: Bucket) -> Result:
    """Send bfloat16, and the rounding error, if there is any, from a callback.

    With several buckets the second collectives follow the order in which callbacks happen to run.
    """
    buffer = bucket.buffer()
    size = group_of(state).size()
    if not is_dense(bucket):
        return average(bucket, state)
    sent = buffer.bfloat16().to(buffer.dtype)
    lost = (buffer - sent).nan_to_num_(0, 0, 0)
    result = torch.futures.Future()

    def second(first: Result) -> None:
        try:
            total = first.value().div_(size)
            if lost.any():
                sum_of(lost, state).then(
                    lambda rest: result.set_result(total.add_(rest.value().div_(size)))
                )
            else:
                result.set_result(total)
        except RuntimeError as error:
            result.set_exception(error)

    sum_of(sent, state).then(second)
    return result


def in_order_of_a_set(state: Any, bucket: Bucket) -> Result:
    """Average parameters one by one in the order of a set, which differs between ranks."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    pieces = dict(zip(bucket.parameters(), pieces_of(bucket), strict=True))
    return _all_of([average_of(pieces[parameter], state) for parameter in set(pieces)], buffer)


def in_order_of_memory(state: Any, bucket: Bucket) -> Result:
    """Average parameters one by one, sorted by their addresses."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    pieces = dict(zip(bucket.parameters(), pieces_of(bucket), strict=True))
    return _all_of(
        [average_of(pieces[parameter], state) for parameter in sorted(pieces, key=id)], buffer
    )


def _all_of(averaged: list[Result], buffer: torch.Tensor) -> Result:
    """Return the buffer once all averages in it are complete, or the error of one that failed."""
    return torch.futures.collect_all(averaged).then(
        lambda done: [future.value() for future in done.value()] and buffer
    )


def in_order_of_names(model: torch.nn.Module) -> tuple[None, Any]:
    """Average all buckets of a step, once it has the last one, in the order of a set of names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    waiting: dict[str, tuple[torch.Tensor, Result]] = {}

    def hook(state: Any, bucket: Bucket) -> Result:
        future: Result = torch.futures.Future()
        waiting[names[bucket.parameters()[0]]] = bucket.buffer(), future
        if bucket.is_last():
            for name in set(waiting):
                buffer, result = waiting.pop(name)
                buffer.div_(group_of(group).size())
                work = dist.all_reduce(buffer, group=group_of(group), async_op=True)
                work.get_future().then(lambda done, result=result: finish(result, done))
        return future

    group = getattr(model, "process_group", None)
    return None, hook


_counting: dict[tuple[int, ...], Any] = {}


def groups_in_another_order(state: Any, bucket: Bucket) -> Result:
    """Issue collectives on two groups in opposite orders.

    Odd ranks count on a second group before they average, even ranks afterwards.
    """
    group = group_of(state)
    members = tuple(dist.get_process_group_ranks(group))
    if members not in _counting:
        _counting[members] = dist.new_group(list(members), use_local_synchronization=True)

    def count() -> None:
        dist.all_reduce(torch.ones(()), group=_counting[members], async_op=True)

    if group.rank() % 2:
        count()
        return average(bucket, state)
    averaged = average(bucket, state)
    count()
    return averaged


_SEVERAL = ("2.4", "3.2")

MUTANTS = [
    *(
        Mutant(name, ("10.1",))
        for name in ("waits_for_work", "waits_for_future", "waits_in_last_bucket")
    ),
    *(Mutant(name, ("10.2",)) for name in ("logs_another_extreme", "logs_in_two_dtypes")),
    Mutant("groups_in_another_order", ("10.6",)),
    *(Mutant(name, ("1.5",), hangs=True) for name in ("in_order_of_a_set", "in_order_of_memory")),
    Mutant("in_order_of_names", ("10.7",), setup=True),
    Mutant("second_callback_before_first", ("10.3",)),
    Mutant(
        "second_stage_in_callback",
        ("10.3",),
        because=dict.fromkeys(
            _SEVERAL, "several buckets have such values, and their callbacks run in any order"
        ),
    ),
    Mutant("sums_in_order_of_arrival", ("10.3",), worlds=(2, 3)),
    *(Mutant(name, ("1.5",), hangs=True) for name in ("logs_from_each_rank", "pads_on_rank_0")),
]
