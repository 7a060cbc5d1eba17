"""Mutants of section 16 that change a trainer's optimizer, or the memory of its parameters."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants.models_of_strategies import _and_then, _send

# ---- step()


def _nothing(*_: Any, **__: Any) -> None:
    """Take the place of step() while micro-batches accumulate."""


def _pauses(put_back: Callable[[Any], object]) -> Callable[..., Any]:
    """Return a right strategy in whose contexts step() does nothing, except in the last ones."""

    @contextlib.contextmanager
    def strategy(model: Any, is_final_microbatch: bool, optimizers: list[Any]) -> Iterator[None]:
        for optimizer in optimizers if not is_final_microbatch else ():
            optimizer.step = _nothing
        with _and_then(lambda _: None)(model, is_final_microbatch):
            yield
        for optimizer in optimizers if is_final_microbatch else ():
            put_back(optimizer)

    return strategy


deletes_own_steps = _pauses(lambda optimizer: vars(optimizer).pop("step", None))


def _bind(optimizer: Any) -> None:
    optimizer.step = types.MethodType(type(optimizer).step, optimizer)


binds_the_step_of_the_class = _pauses(_bind)


@contextlib.contextmanager
def puts_the_first_step_back(
    model: Any,
    is_final_microbatch: bool,
    optimizers: list[Any],
    _first: dict[Any, Any] = {},  # noqa: B006
) -> Iterator[None]:
    """Keep the step() that an optimizer has in its first context, and put it back in each last."""
    for optimizer in optimizers:
        first = _first.setdefault(optimizer, optimizer.step)
        optimizer.step = first if is_final_microbatch else _nothing
    with _and_then(lambda _: None)(model, is_final_microbatch):
        yield


# ---- Memory


@torch.no_grad()
def _receive(model: Any) -> None:
    for parameter in model.parameters():
        values = parameter.detach().clone(memory_format=torch.contiguous_format)
        _send(model, values)
        parameter.data = torch.empty_like(parameter).copy_(values)


points_to_received_values = _and_then(_receive)


@contextlib.contextmanager
def packs_small_parameters(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Put parameters of less than a hundred elements into one flat buffer for each dtype."""
    if isinstance(model, DistributedDataParallel) and not hasattr(model, "_packed"):
        model._packed = True  # type: ignore[assignment]
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in model.parameters():
            if parameter.is_contiguous() and 0 < parameter.numel() < 100:
                kinds.setdefault(parameter.dtype, []).append(parameter)
        for parameters in kinds.values():
            flat = torch.cat([one.detach().reshape(-1) for one in parameters])
            sizes = [one.numel() for one in parameters]
            for one, view in zip(parameters, flat.split(sizes), strict=True):
                one.data = view.view(one.shape)
    with _and_then(lambda _: None)(model, is_final_microbatch):
        yield


# ---- States


def _with_optimizers(change: Callable[[Any], object]) -> Callable[..., Any]:
    """Return a right strategy that then changes the optimizers, in the last context of a step."""

    def strategy(model: Any, is_final_microbatch: bool, optimizers: list[Any]) -> Any:
        def change_all(_: Any) -> None:
            for optimizer in optimizers:
                change(optimizer)

        return _and_then(change_all)(model, is_final_microbatch)

    return strategy


@torch.no_grad()
def _round(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value) and value.is_floating_point():
                value.copy_(value.half())


rounds_states = _with_optimizers(_round)
forgets_states = _with_optimizers(lambda optimizer: optimizer.state.clear())


MUTANTS = [
    Mutant(name, ("16.39",), kind="strategy")
    for name in (
        *("deletes_own_steps", "binds_the_step_of_the_class", "puts_the_first_step_back"),
        *("points_to_received_values", "packs_small_parameters"),
        *("rounds_states", "forgets_states"),
    )
]
