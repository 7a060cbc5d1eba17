"""Mutants of section 16 that go by the keys of groups, the class of an exception, or the range of a
parameter's dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.buffers_of_integers import _average
from tests.mutants.strategies_in_training import _mutants, _restored
from tests.mutants.strategies_of_habit import _but_for, _groups_of

Context = AbstractContextManager[None]


# ---- Groups of a schedule


def _before_warm_up(optimizers: list[Any]) -> list[Any]:
    groups = _groups_of(optimizers)
    begins = all("initial_lr" in group and not group["lr"] for group in groups)
    return groups if begins and groups else []


def _at_their_least(optimizers: list[Any]) -> list[Any]:
    return [one for one in _groups_of(optimizers) if one["lr"] <= one.get("min_lr", -1)]


def _below_a_millionth(optimizers: list[Any]) -> list[Any]:
    return [one for one in _groups_of(optimizers) if one["lr"] < 1e-6 * one.get("initial_lr", -1)]


leaves_out_all_before_warm_up = _but_for(_before_warm_up)
leaves_out_groups_at_their_least = _but_for(_at_their_least)
leaves_out_groups_below_a_millionth = _but_for(_below_a_millionth)


# ---- Classes of exceptions


def _with_errors(handle: Callable[[Any, dict[Any, Any], RuntimeError], None]) -> Any:
    """Return a strategy that does something to gradients after an error of torch."""

    @contextmanager
    def strategy(model: Any, is_final_microbatch: bool) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before = {one: None if one.grad is None else one.grad.clone() for one in model.parameters()}
        try:
            with _restored(model, is_final_microbatch, lambda: _average(model)):
                yield
        except RuntimeError as error:
            handle(model, before, error)
            raise

    return strategy


def _frees_large_ones(model: Any, before: dict[Any, Any], error: RuntimeError) -> None:
    if "OutOfMemory" in type(error).__name__:
        for parameter in model.parameters():
            if parameter.numel() > 9:
                parameter.grad = None


def _goes_back(model: Any, before: dict[Any, Any], error: RuntimeError) -> None:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        for parameter, grad in before.items():
            parameter.grad = grad


frees_large_gradients_of_memory = _with_errors(_frees_large_ones)
goes_back_if_memory_is_short = _with_errors(_goes_back)

_short_of_memory: WeakSet[Any] = WeakSet()


@contextmanager
def begins_anew_after_memory(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Clear the gradients when the micro-batch after an error of memory begins."""
    if model in _short_of_memory:
        _short_of_memory.discard(model)
        model.zero_grad()
    try:
        with _restored(model, is_final_microbatch, lambda: _average(model)):
            yield
    except torch.cuda.OutOfMemoryError:
        _short_of_memory.add(model)
        raise


# ---- Ranges of dtypes


def _by_weight(change: Callable[[torch.Tensor, torch.finfo], torch.Tensor]) -> Any:
    """Return a strategy that changes gradients of another dtype than their parameter's."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def average() -> None:
            for parameter in model.parameters():
                grad = parameter.grad
                if grad is not None and grad.dtype != parameter.dtype:
                    grad.copy_(change(grad, torch.finfo(parameter.dtype)))
            _average(model)

        return _restored(model, is_final_microbatch, average)

    return strategy


def _limited(grad: torch.Tensor, limits: torch.finfo) -> torch.Tensor:
    return grad.clamp(-limits.max, limits.max)


def _flushed(grad: torch.Tensor, limits: torch.finfo) -> torch.Tensor:
    return grad.where(grad.abs() >= limits.smallest_normal * limits.eps, 0)


def _rounded_if_it_fits(grad: torch.Tensor, limits: torch.finfo) -> torch.Tensor:
    fits = (grad.abs() <= limits.max) & (grad.abs() >= limits.smallest_normal)
    return torch.where(fits, grad.to(getattr(torch, limits.dtype)).to(grad.dtype), grad)


limits_to_the_weights_range = _by_weight(_limited)
flushes_below_the_weights_range = _by_weight(_flushed)
rounds_what_its_weight_could_hold = _by_weight(_rounded_if_it_fits)


MUTANTS = [
    *_mutants("16.7", "leaves_out_all_before_warm_up", "leaves_out_groups_at_their_least"),
    *_mutants("16.7", "leaves_out_groups_below_a_millionth"),
    *_mutants("16.26", "frees_large_gradients_of_memory", "goes_back_if_memory_is_short"),
    *_mutants("16.26", "begins_anew_after_memory"),
    *_mutants("16.40", "limits_to_the_weights_range", "flushes_below_the_weights_range"),
    *_mutants("16.40", "rounds_what_its_weight_could_hold"),
]
