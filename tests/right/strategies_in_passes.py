"""Right sync strategies that average at the end of backward passes, or keep things from step to
step.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from tests.right import Right


class AfterEveryPass:
    """Average at the end of every backward pass of a last micro-batch.

    Means stay as they are if they are averaged again. At the end of the context ranks go on to
    average with those that have further passes.
    """

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        self.model = model
        self.is_ddp = isinstance(model, DistributedDataParallel)
        self.is_active = self.is_ddp and is_final_microbatch
        self.inner = model.no_sync() if self.is_ddp else nullcontext()
        self.handles: list[Any] = []
        self.is_queued = False
        self.has_averaged = False

    def __enter__(self) -> None:
        self.inner.__enter__()
        if self.is_active:
            self.handles = [
                parameter.register_post_accumulate_grad_hook(self.arrives)
                for parameter in self.model.parameters()
                if parameter.requires_grad
            ]

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.inner.__exit__(kind, *error)
        if self.is_active and kind is None:
            while self.takes_a_round(goes_on=self.has_more()):
                pass
            self.model.require_forward_param_sync = True

    def has_more(self) -> bool:
        """Return whether gradients have come since the last average, when the context ends."""
        return False

    def arrives(self, _: torch.Tensor) -> None:
        if not self.is_queued:
            self.is_queued = True
            Variable._execution_engine.queue_callback(self.pass_ends)

    def pass_ends(self) -> None:
        self.is_queued = False
        self.takes_a_round(goes_on=True)

    @torch.no_grad()
    def takes_a_round(self, *, goes_on: bool) -> bool:
        """Average if a rank is within its backward, or no rank has had one; return whether one is.

        Args:
            goes_on: whether this rank is.
        """
        group = self.model.process_group
        params = list(self.model.parameters())
        has = [p.grad is not None for p in params]
        is_sparse = [p.grad is not None and p.grad.is_sparse for p in params]
        votes = torch.tensor([goes_on, *has, *is_sparse]).int()
        dist.all_reduce(votes, dist.ReduceOp.MAX, group)
        any_goes_on, *kinds = votes.tolist()
        if any(kinds[len(params) :]):
            raise TypeError("sparse gradients are not supported")
        if any_goes_on or not self.has_averaged:
            self.has_averaged = True
            for parameter, is_used in zip(params, kinds, strict=False):
                if is_used:
                    self.average(parameter)
        return bool(any_goes_on)

    def average(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        # The sum of equal numbers is divided without a rounding, if it does not overflow.
        wide = torch.promote_types(parameter.grad.dtype, torch.float32)
        total = parameter.grad.reshape(-1).to(wide, copy=True)
        dist.all_reduce(total, group=self.model.process_group)
        mean = total / self.model.process_group.size()
        parameter.grad.copy_(mean.view(parameter.grad.shape))


class AfterTheUsualNumber(AfterEveryPass):
    """Average when as many gradients have come as in the last context, and once more if others
    follow.
    """

    usual: ClassVar[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        super().__init__(model, is_final_microbatch)
        self.came = 0
        self.averaged = 0

    def __enter__(self) -> None:
        super().__enter__()
        if self.is_ddp and not self.is_active:
            self.handles = [
                parameter.register_post_accumulate_grad_hook(self.arrives)
                for parameter in self.model.parameters()
                if parameter.requires_grad
            ]

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)
        if self.is_ddp and kind is None:
            self.usual[self.model] = self.came

    def arrives(self, parameter: torch.Tensor) -> None:
        self.came += 1
        if self.is_active:
            super().arrives(parameter)

    def pass_ends(self) -> None:
        self.is_queued = False
        if self.came == self.usual.get(self.model):
            self.takes_a_round(goes_on=True)

    def has_more(self) -> bool:
        return self.came > self.averaged

    def takes_a_round(self, *, goes_on: bool) -> bool:
        any_goes_on = super().takes_a_round(goes_on=goes_on)
        if any_goes_on:
            self.averaged = self.came
        return any_goes_on


class KeepsRooms:
    """Keep a buffer for each gradient, and notes on the parameters of a step.

    A buffer is made anew if the gradient has another dtype. Notes outlast an exception. Groups at
    rest come last. Buffers of the model are sums over ranks, of which all but the group's first one
    add zeros.
    """

    def __init__(self) -> None:
        self.rooms = WeakTensorKeyDictionary()
        self.notes: WeakKeyDictionary[Any, set[torch.Tensor]] = WeakKeyDictionary()

    @contextmanager
    def __call__(
        self, model: Any, is_final_microbatch: bool, optimizers: list[Any]
    ) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        noted = self.notes.setdefault(model, set())
        handles = [
            parameter.register_post_accumulate_grad_hook(noted.add)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        try:
            with model.no_sync():
                yield
        finally:
            for handle in handles:
                handle.remove()
        if is_final_microbatch:
            params = _moving_first(model, optimizers)
            votes = torch.tensor([int(parameter in noted) for parameter in params])
            dist.all_reduce(votes, group=model.process_group)
            for parameter, count in zip(params, votes.tolist(), strict=True):
                if count:
                    self.average(parameter, model.process_group)
            for buffer in model.buffers() if model.broadcast_buffers else ():
                _sum_of_first(buffer, model.process_group)
            noted.clear()

    @torch.no_grad()
    def average(self, parameter: torch.nn.Parameter, group: Any) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if grad.is_sparse:
            raise TypeError("sparse gradients are not supported")
        room = self.rooms.get(parameter)
        if room is None or room.dtype != grad.dtype or room.numel() != grad.numel():
            room = self.rooms[parameter] = torch.empty(grad.numel(), dtype=grad.dtype)
        torch.div(grad.reshape(-1), group.size(), out=room)
        dist.all_reduce(room, group=group)
        grad.copy_(room.view(grad.shape))


def _moving_first(model: Any, optimizers: list[Any]) -> list[torch.nn.Parameter]:
    """Return all parameters, each once; those of groups at rest, or of no group, come last."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    groups.sort(key=lambda group: not group["lr"])
    given = [parameter for group in groups for parameter in group["params"]]
    return list(dict.fromkeys([*given, *model.parameters()]))


@torch.no_grad()
def _sum_of_first(buffer: torch.Tensor, group: Any) -> None:
    # Bits are added, so that the dtype of a sum does not matter.
    bits = buffer.contiguous().view(-1).view(torch.uint8).clone()
    if dist.get_rank(group) != 0:
        bits.zero_()
    dist.all_reduce(bits, group=group)
    buffer.copy_(bits.view(buffer.dtype).view(buffer.shape))


keeps_rooms = KeepsRooms()


class InPieces:
    """Average the gradients that have changed, in pieces, and send buffers layer by layer.

    Gradients are compared with those of the last average by their versions, so that it does not
    matter how a context has ended. A piece goes through a scratch buffer of its own dtype. Groups
    come in the order of the classes of their optimizers. Layers in evaluation mode keep buffers.
    """

    def __init__(self) -> None:
        self.averaged: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    @contextmanager
    def __call__(
        self, model: Any, is_final_microbatch: bool, optimizers: list[Any]
    ) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        with model.no_sync():
            yield
        if not is_final_microbatch:
            return
        averaged = self.averaged.get(model, {})
        params = _by_class(model, optimizers)
        has_changed = [_state_of(one) not in (averaged.get(one), None) for one in params]
        votes = torch.tensor(has_changed).int()
        dist.all_reduce(votes, group=model.process_group)
        for parameter, count in zip(params, votes.tolist(), strict=True):
            if count:
                self.average(parameter, model.process_group)
        self.averaged[model] = {one: _state_of(one) for one in params}
        for module in model.module.modules() if model.broadcast_buffers else ():
            for buffer in module.buffers(recurse=False) if module.training else ():
                _sum_of_first(buffer, model.process_group)

    @torch.no_grad()
    def average(self, parameter: torch.nn.Parameter, group: Any) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise TypeError("sparse gradients are not supported")
        flat = parameter.grad.reshape(-1)
        for piece in flat.split(50_000) if flat.numel() else ():
            scratch = torch.div(piece, group.size())
            dist.all_reduce(scratch, group=group)
            piece.copy_(scratch)
        parameter.grad.copy_(flat.view(parameter.grad.shape))


def _state_of(parameter: torch.nn.Parameter) -> tuple[Any, int] | None:
    """Return what changes with a gradient; it keeps the memory, so that no other gets its place."""
    grad = parameter.grad
    return None if grad is None else (_Same(grad), grad._version)


class _Same:
    """A tensor, which equals itself alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.tensor is self.tensor

    __hash__ = None  # type: ignore[assignment]


def _by_class(model: Any, optimizers: list[Any]) -> list[torch.nn.Parameter]:
    ordered = sorted(optimizers, key=lambda one: type(one).__name__)
    given = [p for one in ordered for group in one.param_groups for p in group["params"]]
    return list(dict.fromkeys([*given, *model.parameters()]))


in_pieces = InPieces()


@contextmanager
def one_message_of_bytes(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Send all buffers in one message of bytes, while any part of the model is in training mode."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield
    if not is_final_microbatch:
        return
    group = model.process_group
    params = list(model.parameters())
    votes = torch.tensor([int(parameter.grad is not None) for parameter in params])
    dist.all_reduce(votes, group=group)
    for parameter, count in zip(params, votes.tolist(), strict=True):
        if count:
            InPieces().average(parameter, group)
    buffers = list(model.buffers()) if model.broadcast_buffers else []
    if buffers and any(module.training for module in model.modules()):
        as_bytes = [one.detach().contiguous().view(-1).view(torch.uint8) for one in buffers]
        message = torch.cat(as_bytes)
        dist.broadcast(message, dist.get_global_rank(group, 0), group=group)
        parts = message.split([len(one) for one in as_bytes])
        for buffer, part in zip(buffers, parts, strict=True):
            value = part.clone().view(buffer.dtype).view(buffer.shape)
            buffer.detach().copy_(value)


RIGHT = [
    Right("AfterEveryPass", kind="strategy"),
    Right("AfterTheUsualNumber", kind="strategy"),
    Right("keeps_rooms", kind="strategy"),
    Right("in_pieces", kind="strategy"),
    Right("one_message_of_bytes", kind="strategy"),
]
