"""Backward passes and gradients of a sync strategy's steps, as trainers have them."""

import builtins
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from conformance.scenarios.interrupts import OUT_OF_MEMORY
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.strategy_breaks import AFTER, BETWEEN, PARTED, WITHIN
from conformance.scenarios.strategy_dtypes import gradient_spec, held_in
from conformance.scenarios.strategy_passes import (
    ASKED,
    IN_PARTS,
    RETAINED,
    SOME_AGAIN,
    Passes,
)
from conformance.scenarios.strategy_training import GRADIENT_DTYPES


def run_backwards(
    passes: Passes, losses: Sequence[torch.Tensor], params: Sequence[torch.Tensor]
) -> None:
    """Run the backward passes of a micro-batch.

    Args:
        passes: the passes.
        losses: the outputs of the forwards.
        params: all parameters.
    """
    loss = losses[0]
    some = [params[index] for index in passes.some]
    if passes.way == RETAINED:
        for _ in range(passes.count - 1):
            loss.backward(retain_graph=True)
    elif passes.way == SOME_AGAIN:
        loss.backward(retain_graph=True)
        for _ in range(passes.count - 1):
            loss.backward(inputs=some, retain_graph=True)
        return
    elif passes.way == ASKED:
        torch.autograd.grad(loss, some, retain_graph=True)
    elif passes.way == IN_PARTS:
        rest = [one for index, one in enumerate(params) if index not in passes.some]
        loss.backward(inputs=some, retain_graph=True)
        loss.backward(inputs=rest)
        return
    for one in losses:
        one.backward()


class _Raises(torch.autograd.Function):
    """A node at which a backward ends by an exception."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise ctx.error


def exception_of(name: str) -> type[BaseException]:
    """Return the class of an exception that ends a micro-batch."""
    # In older versions of torch it has this name alone.
    found: type[BaseException] = (
        torch.cuda.OutOfMemoryError if name == OUT_OF_MEMORY else getattr(builtins, name)
    )
    return found


def break_off(
    way: str,
    model: Callable[[list[torch.Tensor | None]], torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    made: Mapping[int, torch.nn.Parameter],
    error: BaseException,
) -> None:
    """Begin a micro-batch, and raise an exception.

    Args:
        way: where it is raised; a constant of ``scenarios/strategy_breaks.py``.
        model: a forward of the model.
        grads: the gradients of the micro-batch.
        made: the parameters whose gradients it makes before, by their numbers.
        error: the exception.
    """
    some = [grad if index in made else None for index, grad in enumerate(grads)]
    rest = [None if index in made else grad for index, grad in enumerate(grads)]
    if way == BETWEEN:
        model(some).backward()
        model(rest)
    elif way == WITHIN:
        later = _Raises.apply(model(rest), error)
        # The engine begins with the nodes that were made last.
        (model(some) + later).backward()
    else:
        loss = model(list(grads))
        if way == AFTER:
            loss.backward()
        elif way == PARTED:
            loss.backward(inputs=list(made.values()), retain_graph=True)
    raise error


def fail_early(
    context: AbstractContextManager[Any],
    forward: Callable[[], object],
    kind: Callable[[str], BaseException],
) -> None:
    """Run a forward in a context, and raise an exception there; it may come out, and no other."""
    error = kind("this micro-batch failed")
    try:
        with context:
            forward()
            raise error
    except BaseException as caught:
        if caught is not error:
            raise


def give_gradient_dtypes(scenario: Scenario, params: Sequence[torch.Tensor]) -> list[int] | None:
    """Give parameters dtypes of their own, and gradients the dtypes of the scenario.

    Returns:
        The numbers of these parameters; None in versions of torch without ``grad_dtype``.
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        return None
    changed = []
    for index, (spec, parameter) in enumerate(zip(scenario.params, params, strict=True)):
        if held := held_in(scenario, index):
            parameter.data = parameter.data.to(getattr(torch, held.dtype))
            parameter.grad_dtype = None if held.takes_any else getattr(torch, spec.dtype)
            changed.append(index)
    return changed


def change_gradient_dtypes(
    scenario: Scenario, step: int, params: Sequence[torch.Tensor]
) -> tuple[Param, ...]:
    """Give gradients their dtypes in a step; they have been cleared.

    Returns:
        The parameters with the dtypes of their gradients.
    """
    if scenario.variant != GRADIENT_DTYPES.variant or not hasattr(torch.Tensor, "grad_dtype"):
        return scenario.params
    specs = tuple(gradient_spec(scenario, step, index) for index in range(len(params)))
    for spec, parameter in zip(specs, params, strict=True):
        if parameter.grad_dtype is not None:
            parameter.grad_dtype = getattr(torch, spec.dtype)
    return specs


def has_other_strides(parameter: torch.Tensor) -> bool:
    """Whether a dense gradient has other strides than its parameter."""
    grad = parameter.grad
    if grad is None or grad.is_sparse or not grad.numel():
        return False
    strides = zip(parameter.shape, grad.stride(), parameter.stride(), strict=True)
    # The stride of a dimension of size 1 has no meaning.
    return any(size > 1 and stride != right for size, stride, right in strides)
