"""Mutants of quantized collectives: they change tensors on a rank outside of the group, or forget a
rank that is alone in its group.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.feedback_of_collectives import Feedback
from tests.mutants.quantized_collectives import Made, Tensor, right


def decodes_nothing(func: Made, qtype: str) -> Made:
    """Copy the received codes to the outputs, also if the collective has returned at once."""

    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op:
            raise NotImplementedError("async_op is not supported")
        code = tensor.contiguous().half()
        codes = [torch.zeros_like(code) for _ in tensor_list]
        func(codes, code, group=group)
        for output, one in zip(tensor_list, codes, strict=True):
            output.copy_(one.view(output.shape))
        return None

    return all_gather


def world_if_outside(func: Made, qtype: str) -> Made:
    """Take whatever is no process group for WORLD."""

    def exchange(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        known = group if isinstance(group, dist.ProcessGroup) else None
        return right(func)(*args, group=known, **kwargs)

    return exchange


def clears_first(func: Made, qtype: str) -> Made:
    """Fill the output with zeros before the call, which may refuse the group."""

    def all_to_all_single(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent = input.clone()
        output.zero_()
        if kwargs.get("group") is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        return right(func)(output, sent, *args, **kwargs)

    return all_to_all_single


class _Later:
    """The handle of a call whose outputs are decoded when it is waited for."""

    def __init__(self, work: Any, pairs: Any) -> None:
        self.work, self.pairs = work, list(pairs)

    def wait(self, *_: Any) -> bool:
        if self.work is not None:
            self.work.wait()
        for output, code in self.pairs:
            output.copy_(code.view(output.shape))
        return True


def decodes_when_waited_for(func: Made, qtype: str) -> Made:
    """Return at once outside of the group, unless the call is asynchronous."""

    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is dist.GroupMember.NON_GROUP_MEMBER and not async_op:
            return None
        code = tensor.contiguous().half()
        codes = [torch.zeros_like(code) for _ in tensor_list]
        work = func(codes, code, group=group, async_op=True)
        later = _Later(work, zip(tensor_list, codes, strict=True))
        return later if async_op else later.wait() and None

    return all_gather


def nothing_alone(func: Made, qtype: str) -> Made:
    """Do nothing on a rank that is alone in its group: there is nobody to send to."""

    def exchange(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        if isinstance(group, dist.ProcessGroup) and group.size() == 1 < dist.get_world_size():
            return None
        return right(func)(*args, group=group, **kwargs)

    return exchange


def nothing_later_alone(func: Made, qtype: str) -> Made:
    """Do nothing in asynchronous calls of a rank that is alone in its group."""

    def exchange(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        if async_op and isinstance(group, dist.ProcessGroup) and group.size() == 1:
            return None
        return right(func)(*args, group=group, async_op=async_op, **kwargs)

    return exchange


# ---- Feedback that a call outside of the group changes


class EncodesOutside(Feedback):
    """Encode what a call is given, and then look whether the rank is in the group."""

    def __init__(self, func: Made, qtype: str, error_feedback: bool) -> None:
        super().__init__(func)

    def __call__(self, into: Any, given: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is not dist.GroupMember.NON_GROUP_MEMBER:
            return super().__call__(into, given, *args, **kwargs)
        self.go(given if isinstance(given, list) else [given], kwargs.get("async_op", False))
        return None

    def go(self, tensors: list[Any], async_op: bool) -> None:
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                self.encoded(place, tensor)


class EncodesLaterOutside(EncodesOutside):
    """Encode first if the call is asynchronous, to overlap the two."""

    def go(self, tensors: list[Any], async_op: bool) -> None:
        if async_op:
            super().go(tensors, async_op)


class ForgetsOutside(EncodesOutside):
    """Drop all errors in a call outside of the group, as if the group were another one."""

    def go(self, tensors: list[Any], async_op: bool) -> None:
        self.errors.clear()


class CountsOutside(EncodesOutside):
    """Send zeros after a call outside of the group, as if the message had been sent in it."""

    is_sent = False

    def go(self, tensors: list[Any], async_op: bool) -> None:
        self.is_sent = True

    def encoded(self, place: int, tensor: Tensor) -> Tensor:
        given = torch.zeros_like(tensor) if self.is_sent else tensor
        self.is_sent = False
        self.errors.clear()
        return super().encoded(place, given)


def _fed_back(name: str, func: str, feedback: bool = True) -> Mutant:
    target = f"{name},func={func},qtype=INT8,error_feedback={feedback}"
    return Mutant(target, ("18.36",), kind="collective")


OF = {"kind": "collective"}
MUTANTS = [
    Mutant("decodes_nothing,func=all_gather,qtype=FP16", ("18.36",), **OF),
    Mutant("world_if_outside,func=all_gather,qtype=FP16", ("18.36",), **OF),
    Mutant("decodes_when_waited_for,func=all_gather,qtype=FP16", ("18.36",), **OF),
    Mutant("nothing_alone,func=all_gather,qtype=FP16", ("18.11",), **OF),
    Mutant("nothing_alone,func=all_to_all_single,qtype=FP16", ("18.11",), **OF),
    Mutant("nothing_later_alone,func=all_gather,qtype=FP16", ("18.11",), **OF),
    Mutant("clears_first,func=all_to_all_single,qtype=FP16", ("18.36",), **OF),
    _fed_back("EncodesOutside", "all_gather"),
    _fed_back("EncodesLaterOutside", "all_to_all"),
    _fed_back("ForgetsOutside", "scatter"),
    _fed_back("CountsOutside", "all_gather", feedback=False),
]
