"""Mutants of strategies that are wrong if gradients are cleared within the first context."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.strategies import _average
from tests.mutants.strategies_in_training import _mutants
from tests.mutants.strategies_that_count import _Counting
from tests.mutants.strategies_that_count import _mutants as _mutants_that_count

Context = AbstractContextManager[None]


@contextmanager
def _beside(model: Any, averages: bool) -> Iterator[None]:
    """Set gradients aside within a context, and add them to those that it has given."""
    kept = {p: p.grad for p in model.parameters() if p.grad is not None}
    for parameter in kept:
        parameter.grad = None
    with model.no_sync():
        yield
    if averages:
        _average(model)
    for parameter, grad in kept.items():
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


@contextmanager
def averages_each_context_alone(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the gradients of each micro-batch, beside the means of those before."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with _beside(model, averages=True):
        yield
    model.require_forward_param_sync = is_final_microbatch


@contextmanager
def keeps_what_single_steps_add(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average as often, and only put back what the parameters' gradients were."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    model.zero_grad()
    with model.no_sync():
        yield
    _average(model)
    with torch.no_grad():
        for parameter, grad in before.items():
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
    model.require_forward_param_sync = is_final_microbatch


class KeepsWhatItCounts(_Counting):
    """Count micro-batches; the first one of a step sets aside what gradients hold before it."""

    def __call__(self, model: Any) -> Context:
        """Count, and average when the last one is over."""
        self.count += 1
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return self._within(model, self.count % self.steps == 1)

    @contextmanager
    def _within(self, model: Any, is_first: bool) -> Iterator[None]:
        with _beside(model, averages=False) if is_first else model.no_sync():
            yield
        if self.is_last():
            _average(model)


MUTANTS = [
    *_mutants("16.2", "averages_each_context_alone", "keeps_what_single_steps_add"),
    *_mutants_that_count("16.2", "KeepsWhatItCounts"),
    *_mutants_that_count("16.2", "KeepsWhatItCounts", steps=3),
]
