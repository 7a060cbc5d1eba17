"""Mutants of section 16: parts that are frozen within a step, and buffers of each rank's own."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.strategies import _average, _filled, _mean, _trainable
from tests.mutants.strategies_in_training import _mutants, _restored

Context = AbstractContextManager[None]

# ---- Parts that are frozen within a step


@contextmanager
def averages_those_of_the_last(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the parameters that a hook of the last backward has seen, or another rank's has."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    params = _trainable(model) if is_final_microbatch else []
    with model.no_sync():
        yield
    if is_final_microbatch:
        filled = set(_filled(model))
        for parameter in params:
            if parameter in filled:
                parameter.grad = _mean(parameter.grad, model.process_group)
        model.require_forward_param_sync = True


_first: list[torch.nn.Parameter] = []


@contextmanager
def averages_those_of_the_first(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the parameters that are trained when the first micro-batch of a step begins."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    if all(parameter.grad is None for parameter in model.parameters()):
        _first[:] = _trainable(model)
    with model.no_sync():
        yield
    if is_final_microbatch:
        filled = set(_filled(model))
        for parameter in _first:
            if parameter in filled:
                parameter.grad = _mean(parameter.grad, model.process_group)
        model.require_forward_param_sync = True


# ---- Buffers of each rank's own


def _send(model: Any) -> None:
    root = dist.get_global_rank(model.process_group, 0)
    for buffer in model.buffers():
        dist.broadcast(buffer, root, group=model.process_group)


@contextmanager
def sends_buffers_first(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Send the buffers of the first rank as each micro-batch begins, whatever DDP was told."""
    if isinstance(model, DistributedDataParallel):
        _send(model)
    with _restored(model, is_final_microbatch, lambda: _average(model)):
        yield


def gathers_buffers(model: Any, is_final_microbatch: bool) -> Context:
    """Load the buffers of the first rank when a step ends."""

    def finish() -> None:
        _average(model)
        buffers = list(model.buffers())
        of_ranks: list[Any] = [None] * model.process_group.size()
        dist.all_gather_object(of_ranks, buffers, group=model.process_group)
        for buffer, value in zip(buffers, of_ranks[0], strict=True):
            buffer.copy_(value)

    return _restored(model, is_final_microbatch, finish)


MUTANTS = [
    *_mutants("16.36", "averages_those_of_the_last", "averages_those_of_the_first"),
    *_mutants("16.24", "sends_buffers_first", "gathers_buffers"),
]
