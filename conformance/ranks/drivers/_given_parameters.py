"""The parameters, and the gradients, that a trainer's call gives to an averager."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from conformance.ranks.drivers.base import RankDriver
from conformance.scenarios.averager import FORMS
from conformance.scenarios.averager_loops import Overflow, is_of_subclass
from conformance.scenarios.averager_training import IDLE
from conformance.scenarios.model import Scenario

Parameters = list[torch.nn.Parameter]


class Weight(torch.nn.Parameter):
    """A parameter of a subclass, as packages for quantized or adapted weights have them."""


def give_subclasses(scenario: Scenario, params: Parameters) -> None:
    """Let the drawn parameters be of a subclass, as ``UninitializedParameter.materialize`` does."""
    for index, parameter in enumerate(params):
        if is_of_subclass(scenario, index):
            parameter.__class__ = Weight


def gradient_of(
    parameter: torch.nn.Parameter, level: float, overflows: Overflow | None
) -> torch.Tensor:
    """Return a gradient with one value, except for an overflow in one or all elements."""
    made = torch.full_like(parameter, level)
    if overflows is None:
        return made
    largest = torch.finfo(made.dtype).max
    value = largest if overflows.value == "largest" else float(overflows.value)
    if overflows.element is None:
        return made.fill_(value)
    at = int(overflows.element * made.numel())
    made[tuple(int(place) for place in torch.unravel_index(torch.tensor(at), made.shape))] = value
    return made


def give_gradients(params: Parameters) -> None:
    """Give trained parameters without a gradient one, as a backward would: an averager may raise if
    no parameter has one on any rank.
    """
    for parameter in params:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = gradient_of(parameter, 1.0, None)


@contextmanager
def frozen(params: Parameters) -> Iterator[None]:
    """Let no parameter require a gradient inside the context."""
    required = [parameter.requires_grad for parameter in params]
    for parameter in params:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, requires in zip(params, required, strict=True):
            parameter.requires_grad_(requires)


def make_of_either(
    driver: RankDriver,
    make: Callable[..., Any],
    rare: Callable[[], Any],
    usual: Callable[[], list[Any]],
) -> Any:
    """Return what ``make`` makes of ``params`` in a rare form or, if that raises, in the usual one.

    A trainer sees the error at once. It is no defect: ``params`` may have to be a list.
    """
    activity = driver.activity
    try:
        return make(params=rare)
    except Exception as error:
        driver.activity = activity
        driver.recorder.event("takes_lists", why=f"{type(error).__name__}: {error}"[:300])
    return make(params=usual)


class Given:
    """The parameters in the form of a call: a list, an iterator, or an optimizer's groups.

    Attributes:
        form: the argument of the call.
    """

    def __init__(self, scenario: Scenario, step: int, params: Parameters) -> None:
        self.form = _in_form(scenario.variant, step, params)
        self._before = _contents(self.form)

    def changes(self) -> list[str]:
        """Return the parts of the list, or of the groups, that are others than before the call."""
        now = _contents(self.form)
        return sorted(
            {name for name in {*now, *self._before} if now.get(name) != self._before.get(name)}
        )


def _contents(form: Iterable[Any]) -> dict[str, Any]:
    """Return the contents of a list of parameters or groups by names; none of an iterator.

    Another list of the same parameters is the same content.
    """
    if not isinstance(form, list):
        return {}
    found: dict[str, Any] = {"the list": [id(entry) for entry in form]}
    for number, entry in enumerate(form):
        if isinstance(entry, Mapping):
            for key, value in entry.items():
                is_params = key == "params"
                held = [id(one) for one in value] if is_params else value
                found[f"{key!r} of group {number}"] = held
    return found


def _in_form(variant: str, step: int, params: Parameters) -> Iterable[Any]:
    """Return the parameters in the form of this step: a list, an iterator, or groups."""
    if variant == IDLE.variant and not params:
        nothing: list[Iterable[Any]] = [[], iter(()), [{"params": [], "lr": 0.1}]]
        return nothing[step % len(nothing)]
    if variant != FORMS.variant:
        return params
    first = params[:2]
    rest = params[2:]
    forms: list[Callable[[], Iterable[Any]]] = [
        lambda: list(params),
        lambda: iter(params),
        # A schedule may let a group rest for a while. One is empty if its parameters are frozen.
        lambda: [
            {"params": [], "lr": 0.1, "initial_lr": 0.2},
            {"params": first, "lr": 0.1, "initial_lr": 0.2},
            {"params": rest, "lr": 0.0, "initial_lr": 0.2},
        ],
        # A parameter may be in two groups.
        lambda: [{"params": [*first, rest[0]], "lr": 0.1}, {"params": rest, "lr": 0.2}],
    ]
    # Averages are often due every four steps: all forms come in turn at steps 10, 14, 18, ... too.
    return forms[(step // 4 + step) % len(forms)]()
