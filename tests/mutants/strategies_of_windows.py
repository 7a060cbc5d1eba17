"""Mutants of section 16 that are wrong if a last micro-batch fails, or has no backward, or if one
rank evaluates alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.strategies import _mean, _trainable
from tests.mutants.strategies_in_training import _mutants

_noted: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def _any_rank(group: Any, mine: list[bool]) -> list[bool]:
    """Return for each place of a list whether it is true on any rank."""
    votes = torch.tensor(mine, dtype=torch.uint8)
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    return [bool(vote) for vote in votes]


def _average(model: Any, noted: set[int] | None = None) -> None:
    """Average the gradients of some parameters, or of all, with zeros of ranks that have none."""
    params = list(model.parameters())
    if any(one.grad is not None and one.grad.is_sparse for one in params):
        raise TypeError("sparse gradients are not supported")
    mine = [
        one.grad is not None and (noted is None or at in noted) for at, one in enumerate(params)
    ]
    for parameter, is_used in zip(params, _any_rank(model.process_group, mine), strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(_mean(parameter.grad, model.process_group))
    model.require_forward_param_sync = True


@contextmanager
def forgets_a_failed_window(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the parameters that a window has used; a last micro-batch that fails ends it, too."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    noted = _noted.setdefault(model, set())
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, at=at: noted.add(at))
        for at, parameter in enumerate(model.parameters())
        if parameter.requires_grad
    ]
    try:
        with model.no_sync():
            yield
        if is_final_microbatch:
            _average(model, noted)
    finally:
        for handle in handles:
            handle.remove()
        if is_final_microbatch:
            noted.clear()


@contextmanager
def _counted(model: Any, ran: list[bool]) -> Iterator[None]:
    """Count the gradients of a micro-batch in a list."""
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _: ran.append(True))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        with model.no_sync():
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def votes_on_the_last(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average nothing if no rank has had a backward in the last micro-batch."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    ran: list[bool] = []
    with _counted(model, ran):
        yield
    if is_final_microbatch and any(_any_rank(model.process_group, [bool(ran)])):
        _average(model)


@contextmanager
def gives_up_after_no_work(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Clear gradients if no rank has had a backward in an earlier micro-batch: the step seems to be
    given up.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    ran: list[bool] = []
    with _counted(model, ran):
        yield
    if is_final_microbatch:
        _average(model)
    elif not any(_any_rank(model.process_group, [bool(ran)])):
        for parameter in _trainable(model):
            parameter.grad = None


_hooked: WeakSet[Any] = WeakSet()


@contextmanager
def sends_in_a_lasting_hook(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Send buffers in a hook that stays on the module: one rank alone may evaluate it."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    if model not in _hooked and model.broadcast_buffers:
        _hooked.add(model)
        group = model.process_group

        def send(module: torch.nn.Module, _: Any) -> None:
            for buffer in module.buffers():
                whole = buffer.contiguous()
                dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
                buffer.copy_(whole)

        model.module.register_forward_pre_hook(send)
    with model.no_sync():
        yield
    if is_final_microbatch:
        _average(model)


@contextmanager
def votes_in_a_lasting_hook(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Agree in a hook that stays on the module whether a rank trains: one alone may evaluate it."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    if model not in _hooked:
        _hooked.add(model)
        group = model.process_group
        model.module.register_forward_pre_hook(
            lambda module, _: _any_rank(group, [module.training]) and None
        )
    with model.no_sync():
        yield
    if is_final_microbatch:
        _average(model)


@contextmanager
def leaves_buffers_off(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Send buffers when a step ends, and switch DDP's own broadcast off until a context ends well:
    after an exception the option seems to be the user's.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    sends = model.broadcast_buffers
    model.broadcast_buffers = False
    with model.no_sync():
        yield
    model.broadcast_buffers = sends
    if is_final_microbatch:
        _average(model)
        for buffer in model.buffers() if sends else ():
            whole = buffer.contiguous()
            root = dist.get_global_rank(model.process_group, 0)
            dist.broadcast(whole, root, group=model.process_group)
            buffer.copy_(whole)


MUTANTS = [
    *_mutants("16.26", "forgets_a_failed_window"),
    *_mutants("16.22", "votes_on_the_last", "gives_up_after_no_work"),
    *_mutants("16.24", "sends_in_a_lasting_hook", hangs=True),
    *_mutants("16.24", "leaves_buffers_off"),
    *_mutants("16.29", "votes_in_a_lasting_hook", hangs=True),
]
