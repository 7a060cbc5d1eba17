"""Mutants of rules 18.10 and 18.25: asynchronous calls that say something wrong of themselves, or
that do not know their group any more.

Most send float16. They are made with ``func`` and ``qtype``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import Made, Pending, right
from tests.mutants.summing_collectives import Halves

Tensor = torch.Tensor


def _with_handle(func: Made, handle: Callable[[Pending], Any]) -> Made:
    """Return a right collective whose asynchronous calls return another handle."""

    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        pending = right(func)(*args, async_op=True, **kwargs)
        return handle(pending) if async_op else pending.wait()

    return call


# ---- Handles


def complete_on_the_wire(func: Made, qtype: str) -> Made:
    """Pass on ``is_completed()`` of the collective, whose codes wait() decodes."""

    def handle(pending: Pending) -> Pending:
        pending.is_completed = pending.work.is_completed  # type: ignore[attr-defined]
        return pending

    return _with_handle(func, handle)


def complete_at_once(func: Made, qtype: str) -> Made:
    """Call every call complete, since no code asks so far."""

    def handle(pending: Pending) -> Pending:
        pending.is_completed = lambda: True  # type: ignore[attr-defined]
        return pending

    return _with_handle(func, handle)


def never_complete(func: Made, qtype: str) -> Made:
    """Answer ``is_completed()`` with what was true when the call was made."""

    def handle(pending: Pending) -> Pending:
        pending.is_completed = lambda: False  # type: ignore[attr-defined]
        return pending

    return _with_handle(func, handle)


def future_of_codes(func: Made, qtype: str) -> Made:
    """Pass on the future of the collective, which is complete before codes are decoded."""

    def handle(pending: Pending) -> Pending:
        pending.get_future = pending.work.get_future  # type: ignore[attr-defined]
        return pending

    return _with_handle(func, handle)


def value_of_codes(func: Made, qtype: str) -> Made:
    """Decode in a callback, whose future holds what the collective's future holds: codes."""

    def handle(pending: Pending) -> Pending:
        write = pending.finish

        def decode(done: torch.futures.Future[Any]) -> Any:
            write()
            return done.value()

        future = pending.work.get_future().then(decode)
        pending.get_future = lambda: future  # type: ignore[attr-defined]
        pending.finish = future.wait  # type: ignore[method-assign]
        return pending

    return _with_handle(func, handle)


class CompleteAfterTheFirstPart(Halves):
    """Sum parts on the wire, and gather the sums in wait(); the future is that of the first part.

    It refuses what ``Halves`` refuses, but ``async_op=True``.
    """

    def __call__(self, tensor: Tensor, *args: Any, async_op: bool = False, **named: Any) -> Any:
        if not async_op:
            return super().__call__(tensor, *args, **named)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)

        class _Handle:
            def wait(_) -> None:
                if not done:
                    done.append(True)
                    Halves.__call__(self, tensor, *args, **named)

            def get_future(_) -> Any:
                return future

        done: list[bool] = []
        return _Handle()


def nothing_under_way(func: Made, qtype: str) -> Made:
    """Return at once if there is nothing to send, without an object to wait for."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        return right(func)(tensor_list, tensor, group, async_op) if tensor.numel() else None

    return gather


# ---- Groups


class GroupOfTheLastCall(Halves):
    """Reduce in wait(), on the group and with the size that the object has kept."""

    def __init__(self, func: Any, qtype: str) -> None:
        super().__init__(func, qtype)
        self.group: Any = None

    def __call__(self, *given: Any, group: Any = None, async_op: bool = False, **named: Any) -> Any:
        self.group = group
        done: list[bool] = []

        def finish() -> None:
            if not done:
                done.append(True)
                Halves.__call__(self, *given, group=self.group, **named)

        return _Later(finish) if async_op else finish()


class _Later:
    """A pending call without a collective of its own."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def place_of_the_last_call(func: Made, qtype: str) -> Made:
    """Copy a rank's own part in wait(), to its place in the group of the call that came last."""
    place = [0]

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        place[0] = dist.get_rank(group)
        pending = right(func)(tensor_list, tensor, group, async_op=True)
        write = pending.finish

        def finish() -> None:
            write()
            tensor_list[place[0] % len(tensor_list)].copy_(tensor)

        pending.finish = finish
        return pending if async_op else pending.wait()

    return gather


def _named(name: str, number: str, func: str = "all_gather") -> Mutant:
    return Mutant(f"{name},func={func},qtype=FP16", (number,), kind="collective")


MUTANTS = [
    _named("complete_on_the_wire", "18.10"),
    _named("complete_on_the_wire", "18.10", "all_to_all"),
    _named("complete_at_once", "18.10", "scatter"),
    _named("never_complete", "18.10", "all_to_all_single"),
    _named("future_of_codes", "18.10", "scatter"),
    _named("value_of_codes", "18.10", "all_to_all"),
    _named("CompleteAfterTheFirstPart", "18.10", "all_reduce"),
    _named("nothing_under_way", "18.10"),
    _named("GroupOfTheLastCall", "18.25", "all_reduce"),
    _named("GroupOfTheLastCall", "18.25", "reduce_scatter"),
    _named("place_of_the_last_call", "18.25"),
]
