"""Mutants of rules 18.6, 18.8, 18.27, 18.34 and 18.37: each is wrong where two conditions meet,
such as averages and asynchronous calls.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.feedback_of_collectives import Feedback
from tests.mutants.quantized_collectives import Pending, half, right
from tests.mutants.summing_collectives import Halves

Tensor = torch.Tensor
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class _HalvesWithHandles(Halves):
    """The right collective of sums, whose asynchronous calls work in wait()."""

    def __call__(self, *given: Any, async_op: bool = False, **named: Any) -> Any:
        if not async_op:
            super().__call__(*given, **named)
            return None
        output, code = self._coded(*given, **named)
        total = torch.empty_like(code)
        work = dist.all_to_all_single(total, code, group=named.get("group"), async_op=True)
        return Pending(work, lambda: self._end(output, total, named))

    def _coded(self, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        tensors = {k: v for k, v in named.items() if k not in ("op", "group")}
        output, *rest = [*tensors.values(), *given]
        if not output.is_floating_point():
            raise TypeError("a tensor of floating point is expected")
        self.check(named.get("op", SUM))
        size = dist.get_world_size(named.get("group"))
        parts = self.parts(rest[0], output, size)
        return output, torch.stack([half(part).reshape(-1) for part in parts])

    @torch.no_grad()
    def _end(self, output: Tensor, codes: Tensor, named: dict[str, Any]) -> None:
        output.copy_(codes.float().sum(0).view(output.shape))
        self.finish_asynchronous(output, named.get("op", SUM), len(codes))

    def finish_asynchronous(self, output: Tensor, op: Any, size: int) -> None:
        self.finish(output, op, size)


class SumsIfAsynchronous(_HalvesWithHandles):
    """Give the sum in place of the average if the call is asynchronous."""

    def finish_asynchronous(self, output: Tensor, op: Any, size: int) -> None:
        pass


class OperationOfTheLastCall(_HalvesWithHandles):
    """Divide in wait() if the last call, which may be another one, asks for an average."""

    op: Any = SUM

    def check(self, op: Any) -> None:
        super().check(op)
        self.op = op

    def finish_asynchronous(self, output: Tensor, op: Any, size: int) -> None:
        self.finish(output, self.op, size)


class LayoutOfTheLastCall:
    """Send a matrix in the order of its memory, and transpose what arrives if the last call, which
    may be another one, has a matrix that is transposed.
    """

    def __init__(self, func: Any, qtype: str) -> None:
        self.is_transposed = False

    def __call__(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        self.is_transposed = tensor.dim() == 2 and not tensor.is_contiguous()
        code = half(tensor.t() if self.is_transposed else tensor)
        codes = [torch.empty_like(code) for _ in tensor_list]
        work = dist.all_gather(codes, code, group, async_op=True)

        pairs = list(zip(tensor_list, codes, strict=True))

        def finish() -> None:
            for output, one in pairs:
                output.copy_((one.t() if self.is_transposed else one).reshape(output.shape))

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()


class DividesACopy(Halves):
    """Divide a flat view of the output, which is a copy if the output is not contiguous."""

    def finish(self, output: Tensor, op: Any, size: int) -> None:
        if op == AVG:
            output.reshape(-1).div_(size)


class AveragesOfNumbers(Halves):
    """Leave the ranks out of an average whose values are NaN."""

    def add(self, messages: list[Tensor], group: Any) -> Tensor:
        stacked = torch.stack(messages)
        return stacked.nanmean(0) * len(messages) if self.is_average else stacked.sum(0)

    def check(self, op: Any) -> None:
        super().check(op)
        self.is_average = op == AVG


class DividesItsInput(Halves):
    """Divide the given tensor before it is sent, in place."""

    def parts(self, given: Any, output: Tensor, size: int) -> list[Tensor]:
        parts = super().parts(given, output, size)
        if self.is_average:
            for part in parts:
                part.div_(size)
        return parts

    def check(self, op: Any) -> None:
        super().check(op)
        self.is_average = op == AVG

    def finish(self, output: Tensor, op: Any, size: int) -> None:
        pass


class KeepsItsOwnNumber(Halves):
    """Add a rank's own number unrounded to the rounded ones of its peers."""

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        if tensor.dim():
            super().reduce(tensor, size, group)
            return
        codes = [torch.empty(1, dtype=torch.float16) for _ in range(size)]
        dist.all_gather(codes, tensor.reshape(1).half(), group)
        values = [code.float() for code in codes]
        values[dist.get_rank(group)] = tensor.reshape(1).float()
        tensor.copy_(torch.stack(values).sum())


def _finite(error: Tensor, *_: Tensor) -> Tensor:
    return torch.where(error.isfinite(), error, 0.0)


class FeedsBackInGradMode(Feedback):
    """Neither add nor keep errors under no_grad, as if such calls were evaluations."""

    def __init__(self, func: Callable[..., Any], qtype: str, error_feedback: bool) -> None:
        super().__init__(func, _finite)

    def encoded(self, place: int, tensor: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().encoded(place, tensor)
        return self.blocks.encode(tensor)


class ForgetsOtherLayouts(Feedback):
    """Write errors to a flat view, which is a copy if the tensor is not contiguous."""

    def __init__(self, func: Callable[..., Any], qtype: str, error_feedback: bool) -> None:
        super().__init__(func, _finite)

    def encoded(self, place: int, tensor: Tensor) -> Tensor:
        first = place not in self.errors
        kept = torch.zeros_like(tensor) if first else self.errors[place]
        code = super().encoded(place, tensor)
        kept.reshape(-1).copy_(self.errors[place].reshape(-1))
        self.errors[place] = kept
        return code


def clamps_its_input(func: Callable[..., Any], qtype: str) -> Callable[..., Any]:
    """Clamp to the range of float16 what ``float()`` returns: a float32 tensor itself."""
    return right(func, lambda tensor: half(tensor.detach().float().clamp_(-65504, 65504)))


def copies_back_if_complete(func: Callable[..., Any], qtype: str) -> Callable[..., Any]:
    """Receive in contiguous copies, which an asynchronous call never copies back."""

    def gather(outputs: list[Tensor], *given: Any, async_op: bool = False, **named: Any) -> Any:
        copies = [output.contiguous() for output in outputs]
        called = right(func)(copies, *given, async_op=async_op, **named)
        if async_op:
            return called
        for output, copy in zip(outputs, copies, strict=True):
            output.copy_(copy)
        return None

    return gather


def decodes_in_its_thread(func: Callable[..., Any], qtype: str) -> Callable[..., Any]:
    """Keep what is to be decoded in a threading.local: another thread's wait() decodes nothing."""
    local = threading.local()

    def call(*given: Any, async_op: bool = False, **named: Any) -> Any:
        pending = right(func)(*given, async_op=True, **named)
        waiting = local.__dict__.setdefault("waiting", {})
        waiting[id(pending)] = pending.finish
        pending.finish = lambda: local.__dict__.get("waiting", {}).get(id(pending), int)()
        return pending if async_op else pending.wait()

    return call


def integers_of_world(func: Callable[..., Any], qtype: str) -> Callable[..., Any]:
    """Pass integers to torch's collective without the group."""

    def exchange(output: Tensor, input: Tensor, *given: Any, **named: Any) -> Any:
        if input.is_floating_point():
            return right(func)(output, input, *given, **named)
        return func(output, input)

    return exchange


class _Failed:
    def wait(self) -> bool:
        return False


def fails_in_silence(func: Callable[..., Any], qtype: str) -> Callable[..., Any]:
    """Return a handle whose wait() is false if an asynchronous call cannot begin."""

    def call(*given: Any, async_op: bool = False, **named: Any) -> Any:
        try:
            return right(func)(*given, async_op=async_op, **named)
        except RuntimeError:
            if not async_op:
                raise
            return _Failed()

    return call


def _named(name: str, number: str, func: str) -> Mutant:
    return Mutant(f"{name},func={func},qtype=FP16", (number,), kind="collective")


def _fed_back(name: str, func: str) -> Mutant:
    target = f"{name},func={func},qtype=INT8,error_feedback=True"
    return Mutant(target, ("18.37",), kind="collective")


MUTANTS = [
    _named("SumsIfAsynchronous", "18.37", "reduce_scatter_tensor"),
    _named("OperationOfTheLastCall", "18.37", "reduce_scatter"),
    _named("OperationOfTheLastCall", "18.37", "reduce_scatter_tensor"),
    _named("LayoutOfTheLastCall", "18.37", "all_gather"),
    _named("DividesACopy", "18.37", "all_reduce"),
    _named("DividesACopy", "18.37", "reduce_scatter"),
    _named("AveragesOfNumbers", "18.37", "reduce_scatter_tensor"),
    _named("copies_back_if_complete", "18.37", "all_gather"),
    _named("decodes_in_its_thread", "18.37", "all_to_all"),
    _fed_back("FeedsBackInGradMode", "all_gather"),
    _fed_back("FeedsBackInGradMode", "scatter"),
    _fed_back("ForgetsOtherLayouts", "all_to_all"),
    _named("DividesItsInput", "18.8", "reduce_scatter_tensor"),
    _named("clamps_its_input", "18.8", "all_gather"),
    _named("clamps_its_input", "18.8", "all_to_all"),
    _named("KeepsItsOwnNumber", "18.34", "all_reduce"),
    _named("integers_of_world", "18.6", "all_to_all_single"),
    _named("fails_in_silence", "18.27", "all_gather"),
]
