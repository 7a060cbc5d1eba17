"""Mutants of section 16 that send the buffers of one layout, dtype or mode, and lose others."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.buffers_of_integers import _average, _send
from tests.mutants.strategies import _then
from tests.mutants.strategies_in_training import _mutants

Context = AbstractContextManager[None]


def _sends(send: Callable[[Any, torch.Tensor], object]) -> Callable[..., Context]:
    """Return a strategy that sends each buffer when a step ends, if DDP does."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def finish() -> None:
            _average(model)
            for buffer in model.buffers() if model.broadcast_buffers else ():
                send(model, buffer)

        return _then(model, is_final_microbatch, finish)

    return strategy


# ---- Layouts


def _flattened(model: Any, buffer: torch.Tensor) -> None:
    # A view of a contiguous buffer, and a copy of another one.
    _send(model, buffer.reshape(-1))


def _in_the_order_of_memory(model: Any, buffer: torch.Tensor) -> None:
    data = buffer.contiguous().view(-1)
    _send(model, data)
    buffer.as_strided((buffer.numel(),), (1,)).copy_(data)


def _with_whole_storages(model: Any, buffer: torch.Tensor) -> None:
    # A slice of a larger tensor has no storage of its own.
    storage = buffer.untyped_storage()
    if storage.nbytes() == buffer.numel() * buffer.element_size():
        _send(model, torch.empty(0, dtype=torch.uint8).set_(storage))


sends_flattened_buffers = _sends(_flattened)
writes_in_the_order_of_memory = _sends(_in_the_order_of_memory)
sends_whole_storages = _sends(_with_whole_storages)


# ---- Dtypes


def _as(narrower: dict[torch.dtype, torch.dtype]) -> Callable[[Any, torch.Tensor], None]:
    """Return a function that sends buffers of some dtypes in others."""

    def send(model: Any, buffer: torch.Tensor) -> None:
        sent = buffer.detach().to(narrower.get(buffer.dtype, buffer.dtype))
        _send(model, sent)
        buffer.copy_(sent)

    return send


sends_complex_in_complex64 = _sends(_as({torch.complex128: torch.complex64}))
sends_halves_in_float16 = _sends(_as({torch.bfloat16: torch.float16}))
sends_halves_in_bfloat16 = _sends(_as({torch.float16: torch.bfloat16}))


# ---- Modes


@contextmanager
def sends_first_if_the_module_trains(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Send the buffers as each micro-batch begins, if the module inside of DDP is in training."""
    if isinstance(model, DistributedDataParallel) and model.module.training:
        for buffer in model.buffers() if model.broadcast_buffers else ():
            _send(model, buffer)
    with _then(model, is_final_microbatch, lambda: _average(model)):
        yield


def sends_if_all_layers_train(model: Any, is_final_microbatch: bool) -> Context:
    """Have DDP send buffers, unless some layer is in evaluation mode when a step ends."""

    def finish() -> None:
        _average(model)
        model.require_forward_param_sync = all(one.training for one in model.modules())

    return _then(model, is_final_microbatch, finish)


def sends_buffers_of_the_models_mode(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers of the layers whose mode is that of the model."""

    def finish() -> None:
        _average(model)
        for module in model.module.modules() if model.broadcast_buffers else ():
            if module.training is model.training:
                for buffer in module.buffers(recurse=False):
                    _send(model, buffer)

    return _then(model, is_final_microbatch, finish)


MUTANTS = [
    *_mutants("16.24", "sends_flattened_buffers", "writes_in_the_order_of_memory"),
    *_mutants("16.24", "sends_whole_storages"),
    *_mutants("16.24", "sends_complex_in_complex64", "sends_halves_in_float16"),
    *_mutants("16.24", "sends_halves_in_bfloat16"),
    *_mutants("16.24", "sends_first_if_the_module_trains", "sends_if_all_layers_train"),
    *_mutants("16.24", "sends_buffers_of_the_models_mode"),
]
