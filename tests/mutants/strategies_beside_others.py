"""Mutants of section 16 that are wrong if another model, or another group, is in the midst of its
own step, or if another rank has other gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.strategies import _mean
from tests.mutants.strategies_in_training import _mutants
from tests.mutants.strategies_of_windows import _average

_touched: set[torch.Tensor] = set()
_is_over = [False]


@contextmanager
def _noted(model: Any, noted: set[torch.Tensor]) -> Iterator[None]:
    """Note the parameters whose gradients come, and add nothing else to a context."""
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


def _average_noted(model: Any, noted: set[torch.Tensor]) -> None:
    _average(model, {at for at, one in enumerate(model.parameters()) if one in noted})


@contextmanager
def one_window_for_all_models(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the parameters of a window, which ends with a last micro-batch of any model."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    if _is_over[0]:
        _touched.clear()
        _is_over[0] = False
    with _noted(model, _touched):
        yield
    if is_final_microbatch:
        _average_noted(model, _touched)
        _is_over[0] = True


_begins = [True]


@contextmanager
def sends_buffers_as_any_step_begins(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Send buffers in the first micro-batch after a last one, of whichever model that was."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    if _begins[0] and model.broadcast_buffers:
        for buffer in model.buffers():
            sent = buffer.contiguous()
            dist.broadcast(
                torch.view_as_real(sent) if sent.is_complex() else sent,
                dist.get_global_rank(model.process_group, 0),
                group=model.process_group,
            )
            buffer.copy_(sent)
    _begins[0] = is_final_microbatch
    with model.no_sync():
        yield
    if is_final_microbatch:
        _average(model)
    model.require_forward_param_sync = False


_trained: WeakSet[torch.nn.Module] = WeakSet()


@contextmanager
def sends_buffers_of_an_only_model(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Let DDP send buffers after a step, unless another module was trained before."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    _trained.add(model.module)
    with model.no_sync():
        yield
    if is_final_microbatch:
        _average(model)
        model.require_forward_param_sync = len(_trained) == 1


_of_models: WeakKeyDictionary[Any, set[torch.Tensor]] = WeakKeyDictionary()


@contextmanager
def notes_end_with_any_error(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Drop all notes after an exception, and note the gradients that the failed model has."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    noted = _of_models.setdefault(model, set())
    try:
        with _noted(model, noted):
            yield
    except BaseException:
        _of_models.clear()
        _of_models[model] = {one for one in model.parameters() if one.grad is not None}
        raise
    if is_final_microbatch:
        _average_noted(model, noted)
        noted.clear()


_latest: list[Any] = []


@contextmanager
def window_of_the_latest_model(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the parameters of a window, which begins anew if the model is another one."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    if not any(one is model for one in _latest):
        _latest[:] = [model]
        _touched.clear()
    with _noted(model, _touched):
        yield
    if is_final_microbatch:
        _average_noted(model, _touched)
        _latest.clear()


def _lacks_any(model: Any, group: Any) -> bool:
    """Return whether a rank of a group lacks a gradient."""
    lacks = torch.tensor([any(one.grad is None for one in model.parameters())], dtype=torch.uint8)
    dist.all_reduce(lacks, dist.ReduceOp.MAX, group=group)
    return bool(lacks)


@contextmanager
def _averaged_by(
    model: Any, is_final_microbatch: bool, average: Callable[[Any], None]
) -> Iterator[None]:
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield
    if is_final_microbatch:
        _refuse_sparse(model)
        average(model)
        model.require_forward_param_sync = True


def _refuse_sparse(model: Any) -> None:
    if any(one.grad is not None and one.grad.is_sparse for one in model.parameters()):
        raise TypeError("sparse gradients are not supported")


def votes_on_world_if_one_lacks(
    model: Any, is_final_microbatch: bool
) -> AbstractContextManager[None]:
    """Exchange which gradients ranks have if one lacks some, and forget the group there."""

    def average(model: Any) -> None:
        group = model.process_group
        params = list(model.parameters())
        mine = torch.tensor([one.grad is not None for one in params], dtype=torch.uint8)
        if _lacks_any(model, group):
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        for parameter, is_used in zip(params, mine.tolist(), strict=True):
            if is_used:
                _fill(parameter)
                parameter.grad.copy_(_mean(parameter.grad, group))

    return _averaged_by(model, is_final_microbatch, average)


def divides_by_world_if_one_lacks(
    model: Any, is_final_microbatch: bool
) -> AbstractContextManager[None]:
    """Take the size of WORLD for that of the group if a rank lacks a gradient."""

    def average(model: Any) -> None:
        group = model.process_group
        is_seldom = _lacks_any(model, group)
        for parameter in model.parameters():
            if is_seldom and parameter.requires_grad:
                _fill(parameter)
                parameter.grad.div_(dist.get_world_size())
                sent = parameter.grad.contiguous()
                dist.all_reduce(sent, group=group)
                parameter.grad.copy_(sent)
            elif parameter.grad is not None:
                parameter.grad.copy_(_mean(parameter.grad, group))

    return _averaged_by(model, is_final_microbatch, average)


def _fill(parameter: torch.nn.Parameter) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)


def sums_large_ones_that_it_has(
    model: Any, is_final_microbatch: bool
) -> AbstractContextManager[None]:
    """Average large gradients without a vote: those that this rank has."""

    def average(model: Any) -> None:
        large = {at for at, one in enumerate(model.parameters()) if one.numel() >= 2**16}
        _average(model, set(range(len(list(model.parameters())))) - large)
        for at, parameter in enumerate(model.parameters()):
            if at in large and parameter.grad is not None:
                parameter.grad.copy_(_mean(parameter.grad, model.process_group))

    return _averaged_by(model, is_final_microbatch, average)


def _partly_over_world(
    model: Any, is_final_microbatch: bool, is_over_world: Callable[[torch.Tensor], bool]
) -> AbstractContextManager[None]:
    """Average some gradients over WORLD, and divide by the size of the group."""

    def average(model: Any) -> None:
        params = list(model.parameters())
        others = {at for at, one in enumerate(params) if not is_over_world(one)}
        _average(model, others)
        for at, parameter in enumerate(params):
            if at not in others and parameter.requires_grad:
                _fill(parameter)
                sent = parameter.grad.float().div_(model.process_group.size()).contiguous()
                dist.all_reduce(sent)
                parameter.grad.copy_(sent)

    return _averaged_by(model, is_final_microbatch, average)


def sums_halves_over_world(model: Any, is_final_microbatch: bool) -> AbstractContextManager[None]:
    """Sum gradients of half precision in float32, without group=."""
    halves = (torch.float16, torch.bfloat16)
    return _partly_over_world(model, is_final_microbatch, lambda one: one.dtype in halves)


def sums_large_ones_over_world(
    model: Any, is_final_microbatch: bool
) -> AbstractContextManager[None]:
    """Sum each large gradient of a model by itself, without group=."""
    return _partly_over_world(model, is_final_microbatch, lambda one: one.numel() >= 2**16)


MUTANTS = [
    *_mutants("16.23", "one_window_for_all_models", "window_of_the_latest_model"),
    *_mutants("16.23", "notes_end_with_any_error"),
    *_mutants("16.41", "sends_buffers_as_any_step_begins", "sends_buffers_of_an_only_model"),
    *_mutants("16.9", "votes_on_world_if_one_lacks", worlds=(2, 4), hangs=True),
    *_mutants("16.20", "sums_large_ones_that_it_has"),
    *_mutants("16.9", "divides_by_world_if_one_lacks", worlds=(2, 4)),
    *_mutants("16.9", "sums_halves_over_world", "sums_large_ones_over_world", worlds=(2, 4)),
]
