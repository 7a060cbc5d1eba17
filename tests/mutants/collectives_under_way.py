"""Mutants of rules 18.10 and 18.25: asynchronous calls that say something wrong of themselves, that
do not know their group any more, or that begin collectives in wait().

Most send float16. They are made with ``func`` and ``qtype``.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import Made, Pending, half, right
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


def result_of_codes(func: Made, qtype: str) -> Made:
    """Pass on every method that the handle lacks: ``result()`` is that of the collective."""

    class Passes(Pending):
        def __getattr__(self, name: str) -> Any:
            if name in ("is_completed", "get_future"):
                raise AttributeError(name)
            return getattr(self.work, name)

    return _with_handle(func, lambda pending: Passes(pending.work, pending.finish))


def error_from_before(func: Made, qtype: str) -> Made:
    """Note in the handle that the call is not complete, and forget to strike it out."""

    def handle(pending: Pending) -> Pending:
        reason = RuntimeError("the call is under way")
        pending.exception = lambda: reason  # type: ignore[attr-defined]
        return pending

    return _with_handle(func, handle)


def synchronize_decodes_again(func: Made, qtype: str) -> Made:
    """Clear the buffer of codes for the next call once they are decoded, and decode again."""

    def arrive(output: Tensor, code: Tensor) -> None:
        output.copy_(code)
        code.zero_()

    def call(*args: Any, **kwargs: Any) -> Any:
        pending = right(func, arrive=arrive)(*args, **kwargs)
        if pending:
            pending.synchronize = pending.finish
        return pending

    return call


def succeeds_on_the_source(func: Made, qtype: str) -> Made:
    """Call a scatter a success on the rank that has sent something."""

    def scatter(tensor: Tensor, scatter_list: Any = None, *args: Any, **named: Any) -> Any:
        pending = right(func)(tensor, scatter_list, *args, **named)
        if pending:
            pending.is_success = lambda: bool(scatter_list)
        return pending

    return scatter


class CompleteAfterTheFirstPart(Halves):
    """Write sums in wait(); the future is complete as soon as the parts have been summed.

    It refuses what ``Halves`` refuses, but ``async_op=True``.
    """

    def __call__(self, tensor: Tensor, *args: Any, async_op: bool = False, **named: Any) -> Any:
        if not async_op:
            return super().__call__(tensor, *args, **named)
        total = tensor.clone()
        super().__call__(total, *args, **named)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        later = _Later(lambda: tensor.copy_(total))
        later.get_future = lambda: future  # type: ignore[attr-defined]
        return later


def nothing_under_way(func: Made, qtype: str) -> Made:
    """Return at once if there is nothing to send, without an object to wait for."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        return right(func)(tensor_list, tensor, group, async_op) if tensor.numel() else None

    return gather


# ---- Collectives that begin in wait()


class GathersInWait(Halves):
    """Exchange parts in the call, and gather the sums in wait(): two collectives for each call."""

    def __call__(self, tensor: Tensor, *args: Any, async_op: bool = False, **named: Any) -> Any:
        if not async_op:
            return super().__call__(tensor, *args, **named)
        group = named.get("group")
        size = dist.get_world_size(group)
        flat = tensor.reshape(-1)
        parts = torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(size, -1).half()
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=group, async_op=True)

        def finish() -> None:
            whole = self.gathered(received.float().sum(0), size, group)
            tensor.copy_(whole[: len(flat)].view(tensor.shape))

        return _Once(work.wait, finish)


def second_half_in_wait(func: Made, qtype: str) -> Made:
    """Send long messages in two pieces, the second of them when it is waited for."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if not async_op or tensor.dim() < 2 or len(tensor) < 2:
            return right(func)(tensor_list, tensor, group, async_op)
        middle = len(tensor) // 2
        first = right(func)([out[:middle] for out in tensor_list], tensor[:middle], group, True)

        rest = [out[middle:] for out in tensor_list]

        def finish() -> None:
            right(func)(rest, tensor[middle:], group)

        return _Once(first.wait, finish)

    return gather


class ChecksInWait:
    """Exchange in the call, and check in wait() that all ranks have as many elements.

    If they have not, the outputs are NaN.
    """

    def __init__(self, func: Any, qtype: str) -> None:
        self.inside = right(func)

    def __call__(
        self, output: Tensor, *given: Any, group: Any = None, async_op: bool = False, **named: Any
    ) -> Any:
        pending = self.inside(output, *given, group=group, async_op=True, **named)

        def finish() -> None:
            largest = torch.tensor([output.numel()])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            if largest != output.numel():
                output.fill_(torch.nan)

        later = _Once(pending.wait, finish)
        return later if async_op else later.wait()


class _Once:
    """A pending call whose last part is done by the first wait()."""

    def __init__(self, wait: Callable[[], Any], finish: Callable[[], None]) -> None:
        self.begin = wait
        self.finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        self.begin()
        if self.finish:
            finish = self.finish
            self.finish = None
            finish()


# ---- Groups


class GroupOfTheLastCall(Halves):
    """Average the messages in wait(), times the number of ranks in the group of the last call."""

    def __call__(self, *given: Any, group: Any = None, async_op: bool = False, **named: Any) -> Any:
        self.group = group
        if not async_op:
            return super().__call__(*given, group=group, **named)
        output, *inputs = given
        size = dist.get_world_size(group)
        parts = self.parts(inputs[0], output, size) if inputs else [output] * size
        codes = self.exchanged([part.reshape(-1).half() for part in parts], group)

        def finish() -> None:
            total = torch.stack(codes).float().mean(0) * dist.get_world_size(self.group)
            output.copy_(total.view(output.shape))

        return _Later(finish)


class _Later:
    """A pending call without a collective of its own."""

    def __init__(self, wait: Callable[[], Any]) -> None:
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
        outputs = list(tensor_list)

        def finish() -> None:
            write()
            outputs[place[0] % len(outputs)].copy_(tensor)

        pending.finish = finish
        return pending if async_op else pending.wait()

    return gather


class SharesItsRoom:
    """Encode into memory that all objects share by the number of elements. Each object waits for
    its own last call before it uses that memory again.
    """

    _room: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, func: Made, qtype: str) -> None:
        self._call = right(func, self._encoded)
        self._last: Pending | None = None

    def _encoded(self, tensor: Tensor) -> Tensor:
        code = half(tensor)
        room = self._room.setdefault(tensor.numel(), torch.empty(tensor.numel(), dtype=code.dtype))
        return room.copy_(code.view(-1)).view(code.shape)

    def __call__(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if self._last:
            self._last.wait()
        pending = self._call(*args, async_op=True, **kwargs)
        self._last = pending if async_op else None
        return pending if async_op else pending.wait()


def _named(name: str, number: str, func: str = "all_gather", hangs: bool = False) -> Mutant:
    named = f"{name},func={func},qtype=FP16"
    return Mutant(named, (number,), kind="collective", hangs=hangs)


MUTANTS = [
    _named("complete_on_the_wire", "18.10"),
    _named("complete_on_the_wire", "18.10", "all_to_all"),
    _named("complete_at_once", "18.10", "scatter"),
    _named("never_complete", "18.10", "all_to_all_single"),
    _named("future_of_codes", "18.10", "scatter"),
    _named("value_of_codes", "18.10", "all_to_all"),
    _named("CompleteAfterTheFirstPart", "18.10", "all_reduce"),
    _named("result_of_codes", "18.10"),
    _named("result_of_codes", "18.10", "all_to_all_single"),
    _named("error_from_before", "18.10", "all_to_all"),
    _named("synchronize_decodes_again", "18.10"),
    _named("synchronize_decodes_again", "18.10", "scatter"),
    _named("succeeds_on_the_source", "18.10", "scatter"),
    _named("GathersInWait", "18.10", "all_reduce", hangs=True),
    _named("second_half_in_wait", "18.10"),
    _named("ChecksInWait", "18.10", "all_to_all_single"),
    _named("ChecksInWait", "18.10", "scatter"),
    _named("nothing_under_way", "18.10"),
    _named("GroupOfTheLastCall", "18.25", "all_reduce"),
    _named("GroupOfTheLastCall", "18.25", "reduce_scatter"),
    _named("place_of_the_last_call", "18.25"),
    _named("SharesItsRoom", "18.25"),
]
