"""Mutants of rules 18.16 and 18.22: feedback that is right as long as values have one scale, or are
float32.

They send eight bits, in blocks with a scale each, and are made with ``func``, ``qtype`` and
``error_feedback``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.collectives_in_training import Blocks
from tests.mutants.quantized_collectives import right

Tensor = torch.Tensor
# Returns the error to keep, of the error, the tensor that is sent, and the one fed to the encoding.
Keep = Callable[[Tensor, Tensor, Tensor], Tensor]
# Returns the error to add, of the error that is kept, and the tensor that is sent.
Add = Callable[[Tensor, Tensor], Tensor]


def _whole(error: Tensor, *_: Tensor) -> Tensor:
    return error


class Feedback:
    """Blocks with error feedback: right, and with parts that mutants replace.

    Args:
        func: torch.distributed's all_gather, all_to_all or scatter.
        keep: of an error, what is kept.
        add: of a kept error, what is added.
    """

    def __init__(self, func: Callable[..., Any], keep: Keep = _whole, add: Add = _whole) -> None:
        self.func = func
        self.keep = keep
        self.add = add
        self.blocks = Blocks()
        self.errors: dict[int, Tensor] = {}

    def __call__(self, into: Any, given: Any = None, *args: Any, **kwargs: Any) -> Any:
        listed = given if isinstance(given, list) or given is None else [given]
        codes = [self.encoded(place, tensor) for place, tensor in enumerate(listed or [])]
        waiting = iter(codes)

        def encode(tensor: Tensor) -> Tensor:
            # Rooms for outputs are encodings of zeros, which are made beside those of inputs.
            is_given = any(tensor is one for one in listed or [])
            return next(waiting) if is_given else self.blocks.encode(tensor)

        return right(self.func, encode, self.blocks.decode)(into, given, *args, **kwargs)

    def encoded(self, place: int, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
        fed = tensor.detach().float()
        if place in self.errors:
            fed = fed + self.add(self.errors[place], tensor)
        code = self.blocks.encode(fed)
        arrives = torch.empty_like(fed)
        self.blocks.decode(arrives, code)
        self.errors[place] = self.keep(fed - arrives, tensor, fed)
        return code


class ErrorsAtTheNextCall(Feedback):
    """Compute what a call has lost at the next call, when its tensor may have other values."""

    def __init__(self, func: Callable[..., Any], qtype: str, error_feedback: bool) -> None:
        super().__init__(func)
        # By place: the tensor, its code, and the error that was added to it.
        self.last: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def encoded(self, place: int, tensor: Tensor) -> Tensor:
        self.count()
        added = self.errors.get(place, torch.zeros(tensor.shape))
        code = super().encoded(place, tensor)
        self.last[place] = (tensor, code, added)
        return code

    def count(self) -> None:
        """Keep the errors of the last call."""
        for place, (tensor, code, added) in self.last.items():
            arrives = torch.empty(tensor.shape)
            self.blocks.decode(arrives, code)
            self.errors[place] = tensor.detach().float() + added - arrives
        self.last.clear()


class ErrorsAfterTheCall(ErrorsAtTheNextCall):
    """Compute what a call has lost when it is complete: if the input is a part of the output, it
    has the decoded values then, and nothing seems lost.
    """

    def __call__(self, into: Any, given: Any = None, *args: Any, **kwargs: Any) -> Any:
        pending = super().__call__(into, given, *args, **kwargs)
        if pending is None:
            self.count()
            return None
        write = pending.finish

        def finish() -> None:
            write()
            self.count()

        pending.finish = finish
        return pending


def of_rows_in_use(func: Any, qtype: str, error_feedback: bool) -> Feedback:
    """Keep the errors of rows that the call uses, as of an embedding."""
    return Feedback(func, lambda error, sent, fed: error * (sent != 0).any(-1, keepdim=True))


def if_smaller_than_values(func: Any, qtype: str, error_feedback: bool) -> Feedback:
    """Drop an error that is larger than the values which it is added to, as out of date."""

    def add(error: Tensor, sent: Tensor) -> Tensor:
        is_old = bool(sent.any()) and bool(error.abs().amax() > 4 * sent.abs().amax())
        return torch.zeros_like(error) if is_old else error

    return Feedback(func, add=add)


def in_half_precision(func: Any, qtype: str, error_feedback: bool) -> Feedback:
    """Keep errors in bfloat16, to save memory."""
    return Feedback(func, lambda error, sent, fed: error.bfloat16().float())


def of_float32_alone(func: Any, qtype: str, error_feedback: bool) -> Feedback:
    """Keep no errors of messages in half precision, which have no room for them."""
    return Feedback(
        func, lambda error, sent, fed: error if sent.dtype == torch.float32 else error * 0
    )


def _cleared(error: Tensor) -> Tensor:
    return error.nan_to_num(0.0, 0.0, 0.0)


def cleared_in_float32(func: Any, qtype: str, error_feedback: bool) -> Feedback:
    """Clear errors that are not finite, of messages in float32 alone."""
    return Feedback(
        func, lambda error, sent, fed: _cleared(error) if sent.dtype == torch.float32 else error
    )


def cleared_in_bfloat16(func: Any, qtype: str, error_feedback: bool) -> Feedback:
    """Clear errors that are not finite, but not those of float16."""
    return Feedback(
        func, lambda error, sent, fed: error if sent.dtype == torch.float16 else _cleared(error)
    )


def cleared_within_float16(func: Any, qtype: str, error_feedback: bool) -> Feedback:
    """Keep the largest number of half precision as the error of an infinity."""

    def keep(error: Tensor, sent: Tensor, fed: Tensor) -> Tensor:
        if sent.dtype == torch.float32:
            return _cleared(error)
        largest = torch.finfo(sent.dtype).max
        return torch.where(fed.isinf(), fed.sign() * largest, _cleared(error))

    return Feedback(func, keep)


def in_levels(func: Any, qtype: str, error_feedback: bool) -> Feedback:
    """Keep errors in levels of a scale of the whole tensor, which the next call has another of."""

    def scale(values: Tensor) -> Tensor:
        largest = values.abs().amax()
        return torch.where(largest == 0, 1.0, largest)

    return Feedback(
        func,
        lambda error, sent, fed: error / scale(sent),
        lambda error, sent: error * scale(sent),
    )


class ForgetsTheSum:
    """Make up for messages whole, and for the sum that is gathered unless the next one is small."""

    def __init__(self, func: Any, qtype: str, error_feedback: bool) -> None:
        self.blocks = Blocks()
        self.errors: dict[str, Tensor] = {}

    def __call__(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if not tensor.is_floating_point() or op != dist.ReduceOp.SUM:
            raise TypeError("sums of numbers of floating point alone")
        size = dist.get_world_size(group)
        flat = tensor.detach().reshape(-1).float()
        code = self.encoded("messages", flat)
        codes = [torch.empty_like(code) for _ in range(size)]
        dist.all_gather(codes, code, group)
        total = torch.stack([self.decoded(one, flat) for one in codes]).sum(0)
        if "sum" in self.errors and total.abs().amax() < self.errors["sum"].abs().amax():
            del self.errors["sum"]
        # Every rank has every sum, and rounds all of them: nothing more is sent.
        rounded = self.decoded(self.encoded("sum", total), flat)
        tensor.copy_(rounded.view(tensor.shape))

    def encoded(self, stage: str, values: Tensor) -> Tensor:
        fed = values + self.errors.get(stage, torch.zeros_like(values))
        code = self.blocks.encode(fed)
        self.errors[stage] = fed - self.decoded(code, fed)
        return code

    def decoded(self, code: Tensor, like: Tensor) -> Tensor:
        values = torch.empty_like(like)
        self.blocks.decode(values, code)
        return values


def _named(name: str, func: str = "all_gather", rule: str = "18.16") -> Mutant:
    target = f"{name},func={func},qtype=INT8,error_feedback=True"
    return Mutant(target, (rule,), kind="collective")


MUTANTS = [
    _named("of_rows_in_use"),
    _named("of_rows_in_use", "all_to_all"),
    _named("if_smaller_than_values"),
    _named("in_half_precision", "all_to_all"),
    _named("of_float32_alone"),
    _named("of_float32_alone", "all_to_all"),
    _named("of_float32_alone", "scatter"),
    _named("in_levels", "scatter"),
    _named("ForgetsTheSum", "all_reduce"),
    _named("cleared_in_float32", rule="18.22"),
    _named("cleared_in_bfloat16", "all_to_all", "18.22"),
    _named("cleared_within_float16", "scatter", "18.22"),
    _named("ErrorsAtTheNextCall", rule="18.29"),
    _named("ErrorsAfterTheCall", rule="18.29"),
]
