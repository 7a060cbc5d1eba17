"""The values of a joinable on a rank that joins early: tensors, their elements, and numbers.

The driver finds the values that the steps of the rank change, and its shadows leave as they are. In
another run of the same context some values go back by one step after the first shadow. After later
ones, some tensors get other values: their elements in another order, times a factor below 1. A bit
that is computed from them, such as whether an element is above the median, is then another one too.
Values that are not negative remain so, and so do those up to 1.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.distributed.algorithms.join import JoinHook

from conformance.ranks.drivers._join_numbers import digest_of
from conformance.ranks.drivers._join_parts import parts_of
from conformance.ranks.drivers._joinables import OfGroup
from conformance.ranks.drivers.base import RankDriver

GRADIENT = "gradient"

Mask: TypeAlias = torch.Tensor
"""Whether an element is meant, for each element of a tensor."""

Read = Callable[[], dict[str, torch.Tensor]]


@dataclass
class Kept:
    """Values that the last step of a rank has changed, and that its shadows have left as they were.

    Attributes:
        whole: the names of tensors and numbers.
        parts: the elements of tensors, if shadows have changed others there.
    """

    whole: set[str] = field(default_factory=set)
    parts: dict[str, Mask] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixing:
    """Some tensors that have gone back by a step get other values after later shadows.

    Attributes:
        names: of the tensors.
        draw: draws the values.
        first: the number of the first such shadow; the first of all shadows is 1.
        every: the number of shadows from one to the next one.
    """

    names: frozenset[str]
    draw: random.Random
    first: int
    every: int

    def is_due(self, shadows: int) -> bool:
        """Whether values change after so many shadows."""
        return shadows >= self.first and (shadows - self.first) % self.every == 0

    def of(self, value: torch.Tensor, elements: Mask) -> torch.Tensor:
        """Return a tensor in which each of some elements has the value of another one of them,
        times a drawn factor from 1/16 to 1.
        """
        order = list(range(int(elements.sum())))
        self.draw.shuffle(order)
        mixed = value.detach().clone()
        chosen = mixed[elements.to(value.device)]
        chosen[order] = chosen[order[1:] + order[:1]]
        mixed[elements.to(value.device)] = chosen * 2.0 ** self.draw.uniform(-4, 0)
        return mixed


class Watch:
    """The values of a joinable on a rank that joins early.

    Args:
        read: returns the tensors.
        numbers: returns the numbers.
        to_set_back: the values that go back by one step after the first shadow; those of a name
            without a mask as a whole.
        mixing: those that get other values after later shadows.

    Attributes:
        kept: of all shadows up to now.
        went_back: descriptions of values that have gone back, by name.
    """

    def __init__(
        self,
        read: Read,
        numbers: Callable[[], dict[str, "Number"]],
        to_set_back: dict[str, Mask | None],
        mixing: Mixing | None = None,
    ) -> None:
        self.read = read
        self.numbers = numbers
        self.to_set_back = to_set_back
        self.mixing = mixing
        self.elements: dict[str, Mask] = {}
        self.went_back: dict[str, str] = {}
        self.kept = Kept()
        self.last: dict[str, torch.Tensor] = {}
        self.previous: dict[str, torch.Tensor] = {}
        self.shadows = 0

    def stepped(self) -> None:
        """Keep the values after a step, and those after the step before."""
        self.previous = self.last
        self.last = {name: value.detach().clone() for name, value in self._now().items()}

    def shadowed(self) -> None:
        """Compare the values after a shadow; set some back after the first one."""
        self.shadows += 1
        now = self._now()
        if self.shadows == 1:
            changed = {
                name: differing(value, self.previous.get(name))
                for name, value in self.last.items()
                if value.is_floating_point()
            }
            self.kept.whole = {name for name, mask in changed.items() if mask.any()}
            self.kept.parts = {name: changed[name] for name in self.kept.whole}
        self.kept.whole = {name for name in self.kept.whole if same(now.get(name), self.last[name])}
        for name, mask in list(self.kept.parts.items()):
            left = mask & ~differing(self.last[name], now.get(name))
            if left.any():
                self.kept.parts[name] = left
            else:
                del self.kept.parts[name]
        if self.shadows == 1:
            self._set_back()
        if self.mixing and self.mixing.is_due(self.shadows):
            self._mix(self.mixing)

    def _now(self) -> dict[str, torch.Tensor]:
        return self.read() | {name: number.value for name, number in self.numbers().items()}

    def _set_back(self) -> None:
        tensors = self.read()
        numbers = self.numbers()
        for name, wanted in self.to_set_back.items():
            mask = self.kept.parts.get(name)
            if mask is None or name not in self.previous:
                continue
            if wanted is None and name not in self.kept.whole:
                continue
            elements = mask if wanted is None else mask & wanted
            if name in numbers:
                numbers[name].set(self.previous[name].item())
                self.went_back[name] = name
            elif elements.any() and _set(tensors[name], self.previous[name], elements):
                self.elements[name] = elements
                part = f" ({int(elements.sum())} of {elements.numel()} elements)"
                self.went_back[name] = name + part * (wanted is not None)

    def _mix(self, mixing: Mixing) -> None:
        tensors = self.read()
        for name, elements in self.elements.items():
            if name in mixing.names and name in tensors:
                _set(tensors[name], mixing.of(self.previous[name], elements), elements)


class Steady:
    """The elements of tensors, and the numbers, that each step of a context changes."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.last: dict[str, torch.Tensor] | None = None
        self.changing: dict[str, Mask] = {}

    def stepped(self) -> None:
        """Compare the values with those after the step before."""
        now = {name: value.detach().clone() for name, value in self.read().items()}
        if self.last is not None:
            for name, value in now.items():
                mask = differing(value, self.last.get(name))
                self.changing[name] = self.changing.get(name, mask) & mask
        self.last = now


class Number:
    """A number in floating point among the attributes of a joinable."""

    def __init__(self, holder: Any, key: Any) -> None:
        self.holder = holder
        self.key = key

    @property
    def value(self) -> torch.Tensor:
        return torch.tensor(self.holder[self.key], dtype=torch.float64)

    def set(self, value: float) -> None:
        self.holder[self.key] = value


class Watching(OfGroup):
    """Calls a function after each shadow of the joinable before it."""

    def __init__(self, driver: RankDriver, function: Callable[[], None]) -> None:
        super().__init__(driver.group, driver.device)
        self.function = function

    def join_hook(self, **_: Any) -> JoinHook:
        watching = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                watching.function()

        return Hook()


def tensors_of(subject: Any, with_gradients: bool = True) -> dict[str, torch.Tensor]:
    """Return the dense tensors of a joinable by name, as far as they can be found."""
    found: dict[str, Any] = {}
    parts = {"": subject, **parts_of(subject)}
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            found |= {f"{name}{key}": value for key, value in part.named_parameters()}
            found |= {f"{name}{key}": value for key, value in part.named_buffers()}
        elif isinstance(part, torch.optim.Optimizer):
            found |= _tensors_of_optimizer(name, part)
        elif name:
            found |= _flat(name.removesuffix("."), part, depth=2)
    if with_gradients:
        found |= {
            f"{GRADIENT} of {name}": value.grad
            for name, value in found.items()
            if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None
        }
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    }


def numbers_of(subject: Any) -> dict[str, Number]:
    """Return the numbers in floating point among the attributes of a joinable, in dictionaries and
    lists among them, and in the groups of its optimizers.
    """
    found: dict[str, Number] = {}
    if not isinstance(subject, torch.nn.Module):
        found |= _numbers_in("", getattr(subject, "__dict__", {}))
    for name, part in parts_of(subject).items():
        if isinstance(part, torch.optim.Optimizer):
            for number, group in enumerate(part.param_groups):
                found |= _numbers_in(f"{name}group {number}, ", group)
        elif isinstance(part, (dict, list)):
            found |= _numbers_in(name, part)
    return found


def settings_of(subject: Any) -> dict[str, str]:
    """Return the hyperparameters of optimizers, such as rates."""
    found: dict[str, str] = {}
    for name, part in parts_of(subject).items():
        groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else ()
        for number, group in enumerate(groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    value = value.item()
                if key != "params" and isinstance(value, (int, float, tuple)):
                    found[f"{key} of {name}group {number}"] = repr(value)
    return found


def names_by_parameter(subject: Any, parameters: list[torch.Tensor]) -> dict[str, int]:
    """Return the number of the parameter to which each of the joinable's tensors belongs: it is the
    parameter, or one of an optimizer's state for it.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    found: dict[str, int] = {}
    for name, value in tensors_of(subject, with_gradients=False).items():
        if id(value) in numbers:
            found[name] = numbers[id(value)]
    for name, part in parts_of(subject).items():
        if not isinstance(part, torch.optim.Optimizer):
            continue
        for number, group in enumerate(part.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in numbers:
                    continue
                key = f"{name}group {number}, parameter {place}"
                for field_of_state in part.state.get(parameter, {}):
                    found[f"{key}, {field_of_state}"] = numbers[id(parameter)]
    return found


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return digests of tensors, by name."""
    return {name: digest_of(value) for name, value in tensors.items()}


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors have one shape and equal elements, or neither is there."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


def differing(one: torch.Tensor, other: torch.Tensor | None) -> Mask:
    """Return the elements of the first tensor that differ; all elements if the other one has not
    their shape.
    """
    if other is None or one.shape != other.shape:
        return torch.ones(one.shape, dtype=torch.bool)
    return (one != other).detach().cpu()


def _tensors_of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            key = f"{name}group {number}, parameter {place}"
            found[key] = parameter
            for field_of_state, value in optimizer.state.get(parameter, {}).items():
                found[f"{key}, {field_of_state}"] = value
    return found


def _flat(name: str, value: Any, depth: int) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    items: Any = ()
    if depth and isinstance(value, dict):
        items = value.items()
    elif depth and isinstance(value, (list, tuple)):
        items = enumerate(value)
    found: dict[str, torch.Tensor] = {}
    for place, (key, inner) in enumerate(items):
        # A key may be an object, or its id, which other ranks do not have.
        label = key if isinstance(key, str) else place
        found |= _flat(f"{name}/{label}", inner, depth - 1)
    return found


def _numbers_in(prefix: str, holder: Any) -> Iterator[tuple[str, Number]]:
    items = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for place, (key, value) in enumerate(list(items)):
        if type(value) is float:
            label = key if isinstance(key, str) else place
            yield f"{prefix}{label}", Number(holder, key)


@torch.no_grad()
def _set(tensor: torch.Tensor, value: torch.Tensor, elements: Mask) -> bool:
    """Set some elements of a tensor to those of another one; return whether that is possible."""
    if value.shape != tensor.shape:
        return False
    try:
        tensor.copy_(torch.where(elements.to(tensor.device), value, tensor))
    except RuntimeError:
        # The elements of an expanded tensor share their memory.
        return False
    return True
