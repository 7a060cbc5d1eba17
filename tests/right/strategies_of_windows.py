"""Right sync strategies that note which gradients the micro-batches of a step have made."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from tests.right import Right

# For each model, the parameters whose gradients have come since its last micro-batch.
_windows: WeakKeyDictionary[Any, WeakTensorKeyDictionary] = WeakKeyDictionary()


def _vote(mine: list[bool], group: Any) -> list[bool]:
    """Return for each place of a list whether it is true on any rank of a group."""
    votes = torch.tensor(mine, dtype=torch.uint8)
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    return votes.bool().tolist()


def _average(params: list[torch.nn.Parameter], are_used: list[bool], group: Any) -> None:
    """Average gradients one by one, with zeros of ranks that have none."""
    for parameter, is_used in zip(params, are_used, strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        sent = parameter.grad.div(group.size()).contiguous()
        dist.all_reduce(sent, group=group)
        parameter.grad.copy_(sent)


def _refuse_sparse(params: list[torch.nn.Parameter]) -> None:
    if any(one.grad is not None and one.grad.is_sparse for one in params):
        raise TypeError("sparse gradients are not supported")


@contextmanager
def noted_by_model(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the parameters whose gradients have come in a window, which is that of a model."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    noted = _windows.setdefault(model, WeakTensorKeyDictionary())
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda one: noted.update({one: True}))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        with model.no_sync():
            yield
    finally:
        for handle in handles:
            handle.remove()
    if not is_final_microbatch:
        return
    params = list(model.parameters())
    _refuse_sparse(params)
    mine = [one in noted and one.grad is not None for one in params]
    _average(params, _vote(mine, model.process_group), model.process_group)
    noted.clear()
    model.require_forward_param_sync = True


@contextmanager
def asks_if_one_lacks(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Ask first whether a rank of the group lacks a gradient, and then which of them it has."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield
    if not is_final_microbatch:
        return
    group = model.process_group
    params = list(model.parameters())
    _refuse_sparse(params)
    are_used = [one.grad is not None for one in params]
    if any(_vote([not all(are_used)], group)):
        are_used = _vote(are_used, group)
    _average(params, are_used, group)
    model.require_forward_param_sync = True


_HALVES = (torch.float16, torch.bfloat16)
# For each parameter of half precision the sum of its gradients in float32, and the sum as it was
# written to the gradient.
_sums: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _is_half(parameter: torch.nn.Parameter) -> bool:
    grad = parameter.grad
    return parameter.dtype in _HALVES and (grad is None or grad.dtype == parameter.dtype)


def _is_summed(parameter: torch.nn.Parameter) -> bool:
    entry = _sums.get(parameter)
    if entry is None or parameter.grad is None:
        return False
    return torch.equal(parameter.grad, entry[1])


def _add(parameter: torch.nn.Parameter, goes_on: bool) -> None:
    """Add a gradient to its sum, which may begin anew, and write the sum to the gradient."""
    earlier = _sums.pop(parameter, None)
    if parameter.grad is None or not _is_half(parameter):
        return
    total = parameter.grad.float()
    if goes_on and earlier is not None:
        total += earlier[0]
    parameter.grad.copy_(total)
    _sums[parameter] = (total, parameter.grad.clone())


@contextmanager
def sums_beside_halves(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Accumulate gradients of half precision in float32 beside them, and round the sum.

    A sum ends with its gradient: when that is cleared, or changed by others.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    params = list(model.parameters())
    group = model.process_group
    # These gradients are in the sums; meanwhile they are zeros.
    held = {parameter: parameter.grad for parameter in params if _is_summed(parameter)}
    for grad in held.values():
        grad.zero_()
    try:
        with model.no_sync():
            yield
    finally:
        for parameter in params:
            _add(parameter, parameter.grad is held.get(parameter))
    if not is_final_microbatch:
        return
    _refuse_sparse(params)
    are_used = _vote([one.grad is not None for one in params], group)
    for parameter, is_used in zip(params, are_used, strict=True):
        if not is_used or not _is_half(parameter):
            _average([parameter], [is_used], group)
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        total, _ = _sums.pop(parameter, (parameter.grad.float(), None))
        sent = total.div(group.size()).contiguous()
        dist.all_reduce(sent, group=group)
        parameter.grad.copy_(sent)
    model.require_forward_param_sync = True


@contextmanager
def sends_buffers_itself(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Send buffers when a step ends, and switch DDP's own broadcast off within contexts."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    sends = model.broadcast_buffers
    model.broadcast_buffers = False
    try:
        with model.no_sync():
            yield
    finally:
        model.broadcast_buffers = sends
    if not is_final_microbatch:
        return
    group = model.process_group
    params = list(model.parameters())
    _refuse_sparse(params)
    _average(params, _vote([one.grad is not None for one in params], group), group)
    for buffer in model.buffers() if sends else ():
        whole = buffer.contiguous()
        dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
        buffer.copy_(whole)


RIGHT = [
    Right("sends_buffers_itself", kind="strategy"),
    Right("sums_beside_halves", kind="strategy"),
    Right("noted_by_model", kind="strategy"),
    Right("asks_if_one_lacks", kind="strategy"),
]
