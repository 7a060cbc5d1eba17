"""Changes that the body of a join context makes for good: of modes, rates, and settings of torch.

A training loop freezes a layer after some steps, switches a part to eval(), lowers a rate, or sets
a default of torch, and means it to last. The changes are drawn for each context, the same on all
ranks.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from conformance.scenarios.join_loop_draws import AT_BEGIN, AT_END, LoopContext

# The events at the places of the changes.
_EVENTS = {AT_BEGIN: "begun", AT_END: "leaving"}


@dataclass(frozen=True)
class Number:
    """A hyperparameter.

    Attributes:
        read: returns its value.
        write: sets it.
    """

    read: Callable[[], float]
    write: Callable[[float], object]


def attribute(owner: Any, name: str) -> Number:
    """Return a hyperparameter that is an attribute."""
    return Number(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def of_group(owner: Any, name: str) -> Number:
    """Return a hyperparameter of the first of an object's ``param_groups``."""

    def write(value: float) -> None:
        owner.param_groups[0][name] = value

    return Number(lambda: owner.param_groups[0][name], write)


def _change_default_dtype() -> None:
    is_double = torch.get_default_dtype() is torch.float64
    torch.set_default_dtype(torch.float32 if is_double else torch.float64)


def _change_determinism() -> None:
    torch.set_deterministic_debug_mode(
        "default" if torch.get_deterministic_debug_mode() else "warn"
    )


def _change_filling() -> None:
    settings = torch.utils.deterministic
    settings.fill_uninitialized_memory = not settings.fill_uninitialized_memory


def _change_grad_mode() -> None:
    torch.set_grad_enabled(not torch.is_grad_enabled())


# The precision of matmul is not among them: once it was set, flags of torch.backends differ, and
# torch has no function that puts them back.
_SETTINGS = (_change_determinism, _change_filling)
# These would change the work of a model, and the tensors that ranks exchange: all ranks have to
# change them before their first step.
_SETTINGS_OF_STEPS = (_change_default_dtype, _change_grad_mode)


@contextmanager
def settings_put_back() -> Iterator[None]:
    """Put back, after a block, the settings of torch that a body may change."""
    dtype = torch.get_default_dtype()
    determinism = torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    grad_mode = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_deterministic_debug_mode(determinism)
        torch.utils.deterministic.fill_uninitialized_memory = filling
        torch.set_grad_enabled(grad_mode)


class LastingChanges:
    """The changes of one context.

    Args:
        draw: the source of the choices, the same on all ranks.
        context: the context.

    Attributes:
        event: the event at which they are made.
    """

    def __init__(self, draw: random.Random, context: LoopContext) -> None:
        self._draw = draw
        self.event = _EVENTS[context.changes_at]
        has_model = context.place_of_model >= 0
        self._settings = list(_SETTINGS)
        if context.changes_at == AT_BEGIN and not has_model:
            self._settings += _SETTINGS_OF_STEPS

    def make(
        self,
        modules: Mapping[str, torch.nn.Module],
        parameters: Mapping[str, torch.Tensor],
        numbers: Mapping[str, Number],
    ) -> None:
        """Change some of the modes, all hyperparameters, and settings of torch.

        Args:
            modules: their modes of training change.
            parameters: their requires_grad changes.
            numbers: the hyperparameters.
        """
        for change in self._settings:
            change()
        for module in _some(self._draw, modules):
            module.training = not module.training
        for parameter in _some(self._draw, parameters):
            parameter.requires_grad = not parameter.requires_grad
        for number in numbers.values():
            number.write(self._draw.uniform(0.1, 0.9))


def _some(draw: random.Random, every: Mapping[str, Any]) -> list[Any]:
    """Return some of the values, one at least unless there is none."""
    values = list(every.values())
    return draw.sample(values, draw.randint(1, len(values))) if values else []
