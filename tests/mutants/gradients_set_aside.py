"""Mutants of strategies that write to the gradients of an earlier step, which were set aside."""

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants.strategies import _filled, _mean
from tests.mutants.strategies_in_training import _mutants, _restored

Context = AbstractContextManager[None]

_caches: weakref.WeakKeyDictionary[Any, dict[int, torch.Tensor]] = weakref.WeakKeyDictionary()


def caches_all_means(model: Any, is_final_microbatch: bool) -> Context:
    """Give each parameter the same tensor as gradient in every step."""
    cache = _caches.setdefault(model, {})

    def average() -> None:
        for place, parameter in enumerate(model.parameters()):
            if parameter.grad is None:
                continue
            mean = _mean(parameter.grad, model.process_group)
            if place not in cache or parameter.grad is cache[place] or mean.is_sparse:
                cache[place] = mean
            parameter.grad = cache[place].copy_(mean)

    return _restored(model, is_final_microbatch, average)


def caches_the_unused(model: Any, is_final_microbatch: bool) -> Context:
    """Give parameters without a gradient on this rank a tensor that is kept, and written anew."""
    cache = _caches.setdefault(model, {})

    def average() -> None:
        parameters = list(model.parameters())
        used = torch.tensor([parameter.grad is not None for parameter in parameters]).int()
        dist.all_reduce(used, dist.ReduceOp.MAX, model.process_group)
        for place, (parameter, is_used) in enumerate(zip(parameters, used.tolist(), strict=True)):
            if not is_used:
                continue
            is_kept = parameter.grad is None
            if is_kept:
                if place not in cache:
                    cache[place] = torch.empty_like(parameter)
                parameter.grad = cache[place].zero_()
            mean = _mean(parameter.grad, model.process_group)
            if is_kept:
                parameter.grad.copy_(mean)
            else:
                parameter.grad = mean

    return _restored(model, is_final_microbatch, average)


def clears_what_it_gave(model: Any, is_final_microbatch: bool) -> Context:
    """Keep the gradients of a step to fill them with zeros when the next one ends."""
    cache = _caches.setdefault(model, {})

    def average() -> None:
        for grad in cache.values():
            grad.zero_()
        cache.clear()
        for place, parameter in enumerate(_filled(model)):
            parameter.grad = _mean(parameter.grad, model.process_group)
            if not parameter.grad.is_sparse:
                cache[place] = parameter.grad

    return _restored(model, is_final_microbatch, average)


MUTANTS = [
    *_mutants("16.1", "caches_all_means", "clears_what_it_gave"),
    *_mutants("16.4", "caches_the_unused"),
]
