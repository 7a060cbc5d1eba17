"""Hooks with callbacks that start collectives, and need a stream's order."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import STATE, Bucket, Group, Result, State, dense


def _when_over(collective: dist.Work, then: Callable[[], object], result: Result) -> None:
    """Call ``then`` after a collective; ``result`` receives an error of either."""

    def called(done: torch.futures.Future) -> None:
        try:
            done.value()
            then()
        except RuntimeError as error:
            result.set_exception(error)

    collective.get_future().add_done_callback(called)


def divides_first_if_it_has_to(group: Group, bucket: Bucket) -> Result:
    """Reduce the largest element; from a callback, divide before the sum if it would overflow."""
    buffer = dense(bucket)
    size = group.size()
    result = torch.futures.Future()
    largest = buffer.abs().amax() if buffer.numel() else buffer.new_zeros(())

    def add() -> None:
        fits = bool(largest * size <= torch.finfo(buffer.dtype).max)  # False for NaN
        if not fits:
            buffer.div_(size)
        reduced = dist.all_reduce(buffer, group=group, async_op=True)
        _when_over(
            reduced, lambda: result.set_result(buffer.div_(size) if fits else buffer), result
        )

    _when_over(
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True), add, result
    )
    return result


def coarse_then_fine(group: Group, bucket: Bucket) -> Result:
    """Sum the multiples of four; from a callback, sum the remainders."""
    buffer = dense(bucket)
    size = group.size()
    result = torch.futures.Future()
    coarse = buffer.div(4).trunc_().mul_(4)
    fine = (buffer - coarse).nan_to_num_(0, 0, 0)

    def add() -> None:
        reduced = dist.all_reduce(fine, group=group, async_op=True)
        _when_over(reduced, lambda: result.set_result((coarse + fine).div_(size)), result)

    _when_over(dist.all_reduce(coarse, group=group, async_op=True), add, result)
    return result


def shared_scale(state: State, bucket: Bucket) -> Result:
    """Reduce the largest element; from a callback, sum 255 levels of it, with error feedback."""
    buffer = dense(bucket)
    size = state.group.size()
    result = torch.futures.Future()
    total = state.residuals.of(bucket) + buffer
    scale = total.abs().amax() if total.numel() else total.new_zeros(())

    def add() -> None:
        finite = bool(scale.isfinite() and scale > 0)
        sent = total.div(scale).mul_(127).round_().mul_(scale / 127) if finite else total.clone()
        state.residuals.keep(bucket, total - sent)
        reduced = dist.all_reduce(sent, group=state.group, async_op=True)
        _when_over(reduced, lambda: result.set_result(sent.div_(size).to(buffer.dtype)), result)

    _when_over(
        dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=state.group, async_op=True), add, result
    )
    return result


RIGHT = [
    *(
        Right(name, "exact, chained", "process_group")
        for name in ("divides_first_if_it_has_to", "coarse_then_fine")
    ),
    Right("shared_scale", "compressed(delta=0.99), chained", STATE),
]
