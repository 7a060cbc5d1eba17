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


RIGHT = [
    Right("noted_by_model", kind="strategy"),
    Right("asks_if_one_lacks", kind="strategy"),
]
