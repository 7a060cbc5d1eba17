"""Mutants of section 16 that have sums in float32 beside gradients of half precision."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants.strategies_in_training import _mutants
from tests.mutants.strategies_of_windows import _any_rank, _average

_HALVES = (torch.float16, torch.bfloat16)

Sums = dict[int, torch.Tensor]
Parameters = list[torch.nn.Parameter]
WideSums = dict[torch.nn.Parameter, torch.Tensor]

_of_models: WeakKeyDictionary[Any, Sums] = WeakKeyDictionary()
_of_all: Sums = {}


def _is_half(parameter: torch.nn.Parameter) -> bool:
    grad = parameter.grad
    return parameter.dtype in _HALVES and (grad is None or grad.dtype == parameter.dtype)


def _average_sum(parameter: torch.nn.Parameter, total: torch.Tensor | None, group: Any) -> None:
    """Average a sum in float32, and round it to the gradient."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    wide = torch.zeros_like(parameter, dtype=torch.float32) if total is None else total
    sent = wide.div(group.size()).contiguous()
    dist.all_reduce(sent, group=group)
    parameter.grad.copy_(sent)


@contextmanager
def _summed(model: Any, is_final_microbatch: bool, sums: Sums) -> Iterator[None]:
    """Sum gradients of half precision by their places, until the last micro-batch ends well."""
    with model.no_sync():
        yield
    params = list(model.parameters())
    halves = {at: one for at, one in enumerate(params) if _is_half(one)}
    for at, one in halves.items():
        if one.grad is not None:
            sums[at] = sums[at] + one.grad.float() if at in sums else one.grad.float()
            one.grad.zero_()
    if not is_final_microbatch:
        return
    votes = _any_rank(model.process_group, [one.grad is not None for one in params])
    _average(model, set(range(len(params))) - set(halves))
    for at, one in halves.items():
        if votes[at]:
            _average_sum(one, sums.pop(at, None), model.process_group)
    sums.clear()


def _strategy(sums_of: Callable[[Any], Sums]) -> Callable[..., Any]:
    @contextmanager
    def strategy(model: Any, is_final_microbatch: bool) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        with _summed(model, is_final_microbatch, sums_of(model)):
            yield

    return strategy


# Sums stay if a step is given up, or ends by an error.
sums_outlive_their_step = _strategy(lambda model: _of_models.setdefault(model, {}))
# Two models have sums in common.
sums_of_all_models = _strategy(lambda _: _of_all)


@contextmanager
def _apart(halves: Parameters, sums: WideSums) -> Iterator[None]:
    """Take gradients out of ``.grad`` for a micro-batch, and add its own to the sums.

    A sum begins anew if its gradient is cleared when the micro-batch begins.
    """
    before = {one: one.grad for one in halves}
    for parameter, grad in before.items():
        if grad is None or not grad.any():
            sums.pop(parameter, None)
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in before.items():
            if parameter.grad is None:
                parameter.grad = grad
                continue
            wide = parameter.grad.float()
            sums[parameter] = sums[parameter] + wide if parameter in sums else wide
            parameter.grad = sums[parameter].to(parameter.dtype)


_apart_of_models: WeakKeyDictionary[Any, WideSums] = WeakKeyDictionary()


@contextmanager
def sums_begin_with_contexts(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Look whether gradients are cleared before a context, and not within it."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    params = list(model.parameters())
    halves = [one for one in params if one.dtype in _HALVES]
    sums = _apart_of_models.setdefault(model, {})
    with _apart(halves, sums), model.no_sync():
        yield
    if not is_final_microbatch:
        return
    votes = _any_rank(model.process_group, [one.grad is not None for one in params])
    _average(model, {at for at, one in enumerate(params) if one.dtype not in _HALVES})
    for parameter, is_used in zip(params, votes, strict=True):
        if is_used and parameter.dtype in _HALVES:
            _average_sum(parameter, sums.get(parameter), model.process_group)
            sums[parameter] = parameter.grad.float()


MUTANTS = [
    Mutant(
        "sums_outlive_their_step",
        ("16.25", "16.14"),
        kind="strategy",
        because={"16.14": "a step that ends by an error leaves its sums to the next one, too"},
    ),
    *_mutants("16.23", "sums_of_all_models"),
    *_mutants("16.36", "sums_begin_with_contexts"),
]
