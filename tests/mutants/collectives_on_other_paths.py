"""Mutants of section 18 whose defect lies on a path that calls seldom take: averages, ranks without
rows, groups, calls outside of the group while another is under way, and complex numbers.

They are made with ``func`` and ``qtype``, and send float16 if they do not say otherwise.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.feedback_of_collectives import Feedback
from tests.mutants.quantized_collectives import Made, Pending, Tensor, half, right
from tests.mutants.summing_collectives import Halves

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
AVG = dist.ReduceOp.AVG
MAX = dist.ReduceOp.MAX

# ---- The rank's own part of a result, without a rounding


class KeepsItsOwn(Halves):
    """An all_reduce in which a rank may keep its own part of the result as it has computed it."""

    op: Any = None

    def check(self, op: Any) -> None:
        self.op = op
        if op != MAX:
            super().check(op)

    def add(self, messages: list[Tensor], group: Any) -> Tensor:
        return torch.stack(messages).amax(0) if self.op == MAX else super().add(messages, group)

    def is_kept(self, total: Tensor) -> bool:
        return False

    def gathered(self, total: Tensor, size: int, group: Any) -> Tensor:
        whole = super().gathered(total, size, group)
        if self.is_kept(total):
            whole.view(size, -1)[dist.get_rank(group)] = total
        return whole


class KeepsItsAverage(KeepsItsOwn):
    """Keep the rank's own part of an average."""

    def is_kept(self, total: Tensor) -> bool:
        return bool(self.op == AVG)


class KeepsItsLargeAverage(KeepsItsOwn):
    """Keep the rank's own part of an average, if it is too large for a buffer."""

    def is_kept(self, total: Tensor) -> bool:
        return bool(self.op == AVG) and total.numel() > 2500


class KeepsItsMaximum(KeepsItsOwn):
    """Compare the messages of other ranks with the rank's own one before that is rounded."""

    def summed(self, parts: Any, group: Any) -> Tensor:
        found = super().summed(parts, group)
        if self.op != MAX:
            return found
        own = parts[dist.get_rank(group)].reshape(-1).float()
        return torch.where(own.half().float() == found, own, found)

    def is_kept(self, total: Tensor) -> bool:
        return bool(self.op == MAX)


# ---- Ranks without rows


def clears_without_rows(func: Made, qtype: str) -> Made:
    """Fill the outputs of a rank that has no rows with zeros."""

    def all_gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):
            raise NotImplementedError("async_op=True is not supported")
        longest = max(output.numel() for output in tensor_list)
        code = torch.zeros(longest, dtype=torch.float16)
        code[: tensor.numel()] = half(tensor).reshape(-1)
        codes = [torch.zeros(longest) for _ in tensor_list]
        right(func)(codes, code.float(), kwargs.get("group"))
        for output, one in zip(tensor_list, codes, strict=True):
            output.copy_(one[: output.numel()].view(output.shape) * bool(tensor.numel()))

    return all_gather


def exchanged(
    outputs: list[Tensor], inputs: list[Tensor], group: Any, async_op: bool
) -> Pending | None:
    """Exchange halves of any sizes; this is right."""
    sizes = [output.numel() for output in outputs]
    sent = torch.cat([half(tensor).reshape(-1) for tensor in inputs])
    received = torch.empty(sum(sizes), dtype=torch.float16)
    of_inputs = [tensor.numel() for tensor in inputs]
    work = dist.all_to_all_single(received, sent, sizes, of_inputs, group, async_op=True)

    pairs = list(zip(outputs, received.split(sizes), strict=True))

    def finish() -> None:
        for output, code in pairs:
            output.copy_(code.view(output.shape))

    pending = Pending(work, finish)
    return pending if async_op else pending.wait()


def _is_empty(tensors: list[Tensor]) -> bool:
    return not any(tensor.numel() for tensor in tensors)


def nothing_for_nothing(func: Made, qtype: str) -> Made:
    """Take part without rows to send, and drop the rows that arrive."""

    def all_to_all(
        outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        into = [torch.empty_like(output) for output in outputs] if _is_empty(inputs) else outputs
        return exchanged(into, inputs, group, async_op)

    return all_to_all


def zeros_for_nothing(func: Made, qtype: str) -> Made:
    """Send zeros if no rows are to arrive."""

    def all_to_all(
        outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        if _is_empty(outputs):
            inputs = [tensor * 0 for tensor in inputs]
        return exchanged(outputs, inputs, group, async_op)

    return all_to_all


# ---- Values that are rounded to float16, and sent as float32


def _wide_if(func: Made, is_wide: Callable[[Any, bool], bool]) -> Made:
    """Return a collective that sends float32 by ``is_wide(group, async_op)``."""
    made = {False: right(func), True: right(func, lambda tensor: half(tensor).float())}

    def exchange(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        known = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
        call = made[is_wide(known, async_op)]
        return call(*args, group=group, async_op=async_op, **kwargs)

    return exchange


def wide_on_groups(func: Made, qtype: str) -> Made:
    """Send float32 on groups that are not WORLD."""
    return _wide_if(func, lambda group, _: group is not dist.group.WORLD)


def wide_on_five_ranks(func: Made, qtype: str) -> Made:
    """Send float32 on five ranks or more."""
    return _wide_if(func, lambda group, _: group.size() > 4)


def wide_meanwhile_on_groups(func: Made, qtype: str) -> Made:
    """Send float32 in asynchronous calls on groups that are not WORLD."""
    return _wide_if(func, lambda group, is_async: is_async and group is not dist.group.WORLD)


# ---- Calls outside of the group while another one is under way


class ClearsOutside:
    """Forget the codes of all calls that are under way in a call outside of the group."""

    def __init__(self, func: Made, qtype: str) -> None:
        self.func = func
        self.under_way: dict[int, Pending] = {}
        self.number = 0

    def __call__(self, *args: Any, group: Any = None, async_op: bool = False, **named: Any) -> Any:
        if group is OUTSIDE:
            self.under_way.clear()
            return None
        pending = right(self.func)(*args, group=group, async_op=True, **named)
        self.number += 1
        self.under_way[self.number] = pending
        later = Pending(pending.work, lambda number=self.number: self.finish(number))  # type: ignore[misc]
        return later if async_op else later.wait()

    def finish(self, number: int) -> None:
        if number in self.under_way:
            self.under_way.pop(number).finish()


class SettlesInWait(Feedback):
    """Keep the errors of a call in its wait(), unless a call outside of the group has dropped them.

    It sends eight bits.
    """

    def __init__(self, func: Made, qtype: str, error_feedback: bool) -> None:
        super().__init__(func)
        self.next: dict[int, Tensor] = {}

    def __call__(self, into: Any, given: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is OUTSIDE:
            self.next.clear()
            return None
        is_async = kwargs.pop("async_op", False)
        pending = super().__call__(into, given, *args, **kwargs, async_op=True)
        finish = pending.finish

        def settle() -> None:
            finish()
            self.errors.update(self.next)
            self.next.clear()

        pending.finish = settle
        return pending if is_async else pending.wait()

    def encoded(self, place: int, tensor: Tensor) -> Tensor:
        before = dict(self.errors)
        code = super().encoded(place, tensor)
        self.next[place] = self.errors[place]
        self.errors = before
        return code


# ---- Complex numbers


def _of_complex(func: Made, encode: Callable[[Tensor], Tensor]) -> Made:
    """Return a right collective but for the code of complex tensors, which has both parts."""

    def arrive(output: Tensor, code: Tensor) -> None:
        output.copy_(torch.view_as_complex(code.float()) if output.is_complex() else code)

    return right(func, lambda one: encode(one) if one.is_complex() else half(one), arrive)


def _parts(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.contiguous()).half()


def swaps_parts(func: Made, qtype: str) -> Made:
    """Send the imaginary part first, and take it for the real one."""
    return _of_complex(func, lambda tensor: _parts(tensor).flip(-1))


def magnitudes_alone(func: Made, qtype: str) -> Made:
    """Send magnitudes without phases."""
    return _of_complex(func, lambda tensor: _parts(tensor.abs().to(tensor.dtype)))


def real_if_large(func: Made, qtype: str) -> Made:
    """Send the real part of more than 1,500 elements alone."""

    def encode(tensor: Tensor) -> Tensor:
        parts = _parts(tensor)
        if tensor.numel() > 1500:
            parts[..., 1] = 0
        return parts

    return _of_complex(func, encode)


OF = {"kind": "collective"}
MUTANTS = [
    *(
        Mutant(f"{name},func=all_reduce,qtype=FP16", ("18.34",), **OF)
        for name in ("KeepsItsAverage", "KeepsItsLargeAverage", "KeepsItsMaximum")
    ),
    *(
        Mutant(f"{name},qtype=FP16", (rule,), **OF)
        for name, rule in (
            ("clears_without_rows,func=all_gather", "18.24"),
            ("nothing_for_nothing,func=all_to_all", "18.24"),
            ("zeros_for_nothing,func=all_to_all", "18.24"),
            ("wide_on_groups,func=all_to_all", "18.15"),
            ("wide_on_five_ranks,func=scatter", "18.15"),
            ("wide_meanwhile_on_groups,func=all_gather", "18.15"),
            ("ClearsOutside,func=scatter", "18.36"),
            ("swaps_parts,func=all_gather", "18.6"),
            ("magnitudes_alone,func=scatter", "18.6"),
            ("real_if_large,func=all_to_all", "18.6"),
        )
    ),
    Mutant("SettlesInWait,func=all_gather,qtype=INT8,error_feedback=True", ("18.36",), **OF),
]
