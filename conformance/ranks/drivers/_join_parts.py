"""The parts of a joinable: its attributes, and the modules and optimizers in objects behind them.

A joinable may leave its model to a trainer, or keep several in a dictionary. The kit therefore
looks into attributes, dictionaries, lists, tuples and sets, and into the objects of a user's
classes. It looks at the attributes of modules, too, which may hold an optimizer, or a module in a
plain list. It reads what is there, and calls no property. Names are paths: ``trainer.net.``, or
``models/generator.`` in a dictionary.

Other values in such places may be scratch: a tensor or a number of a trainer is compared with
nothing. That they follow contexts may be why steps differ, so that they can be read by themselves.
"""

import random
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Values that are further from the joinable are not found. All ranks look at those nearest to it
# first, so that a list that is longer on one of them moves the end of the search alone.
_DEPTH = 6
_HOLDERS = 1000
_LONGEST = 256  # values of a list or a dictionary, which may also be a data set

_SEQUENCES: tuple[Any, ...] = (list, tuple, deque)
_CONTAINERS = (dict, set, frozenset, *_SEQUENCES)
_OTHERS_CODE = {"torch", "conformance", *sys.stdlib_module_names}
_OF_MODULES = vars(torch.nn.Module()).keys()
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_OF_OPTIMIZERS = {"param_groups", "state", "defaults"}


@dataclass(frozen=True)
class Place:
    """A value that the search has come to.

    Attributes:
        path: its name, for people.
        value: the value.
        depth: the number of objects between it and the joinable.
        has_name: it is an attribute, or a value of a dictionary.
    """

    path: str
    value: Any
    depth: int
    has_name: bool


def parts_of(subject: Any) -> dict[str, Any]:
    """Return the attributes of a joinable, and the modules and optimizers that they hold, by name.

    The attributes of a module are its own affair: of these there are modules that it has not
    registered, and optimizers, alone.
    """
    attributes = {} if _is_module(subject) else getattr(subject, "__dict__", {})
    parts = {f"{name}.": value for name, value in attributes.items()}
    for place in _places(subject):
        if _is(place.value, torch.nn.Module, torch.optim.Optimizer):
            parts.setdefault(f"{place.path}.", place.value)
    return parts


def deep_tensors_of(subject: Any) -> dict[str, torch.Tensor]:
    """Return the dense tensors behind the attributes of a joinable, without those of modules and
    optimizers.
    """
    return {
        place.path: place.value
        for place in _places(subject)
        if place.depth and type(place.value) in _PLAIN_TENSORS and _has_values(place.value)
    }


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized)


def named_numbers_of(subject: Any) -> dict[str, int | float]:
    """Return the numbers among the attributes of a joinable and of objects that it holds, and in
    dictionaries there: rates, or counts of contexts.
    """
    return {
        place.path: place.value
        for place in _places(subject)
        if place.has_name and _is(place.value, int, float) and not _is(place.value, bool)
    }


def generators_of(subject: Any) -> dict[str, torch.Generator | random.Random]:
    """Return the random generators of a joinable, and of objects that it holds."""
    return {
        place.path: place.value
        for place in _places(subject)
        if _is(place.value, torch.Generator, random.Random)
    }


def _places(subject: Any) -> Iterator[Place]:
    """Yield the values of a joinable, those nearest to it first, and each object once.

    A module or an optimizer is one value: its parameters and its state are not among them.
    """
    seen = {id(subject), *_ids_of_submodules(subject)}
    holders: deque[Place] = deque([Place("", subject, -1, has_name=True)])
    left = _HOLDERS
    while holders and left:
        left -= 1
        holder = holders.popleft()
        for path, value, has_name in _held(holder):
            place = Place(path, value, holder.depth + 1, has_name)
            if not _is_holder(value):
                yield place
                continue
            if id(value) in seen:
                continue
            seen |= {id(value), *_ids_of_submodules(value)}
            yield place
            if place.depth < _DEPTH:
                holders.append(place)


def _held(holder: Place) -> Iterator[tuple[str, Any, bool]]:
    """Yield the values in an object, with their paths, and whether these end with a name."""
    value = holder.value
    for name, inner in _attributes(value):
        yield f"{holder.path}.{name}".removeprefix("."), inner, True
    if isinstance(value, dict):
        for at, (key, inner) in enumerate(list(dict.items(value))):
            # A key may be an object, or its id, which other ranks do not have.
            label = key if isinstance(key, str) else at
            yield f"{holder.path}/{label}", inner, True
        return
    for kind in _SEQUENCES:
        if isinstance(value, kind):
            for at, inner in enumerate(list(kind.__iter__(value))):
                yield f"{holder.path}/{at}", inner, False
    if isinstance(value, (set, frozenset)):
        for label, inner in _sorted(value):
            yield f"{holder.path}/{label}", inner, False


def _sorted(values: Any) -> list[tuple[str, Any]]:
    """Return the objects of a set by a description, without those that have the same one.

    The order of a set is another one on each rank.
    """
    described: dict[str, list[Any]] = {}
    for value in values:
        label = type(value).__name__
        if _is_module(value):
            label += str([list(parameter.shape) for parameter in value.parameters()])
        described.setdefault(label, []).append(value)
    return [(label, ones[0]) for label, ones in sorted(described.items()) if len(ones) == 1]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, and those of a module's parts, but torch's own ones."""
    if _is_module(value):
        for path, module in value.named_modules():
            for name, inner in list(vars(module).items()):
                if name not in _OF_MODULES:
                    yield f"{path}.{name}".removeprefix("."), inner
        return
    # An optimizer of torch holds another one if it is sharded: that is another one on each rank.
    is_optimizer = _is(value, torch.optim.Optimizer)
    if type(value) in _CONTAINERS or (is_optimizer and _is_others(type(value))):
        return
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = {}
    for name, inner in list(attributes.items()):
        if not (is_optimizer and name in _OF_OPTIMIZERS):
            yield name, inner
    for made in type(value).__mro__:
        for name, slot in vars(made).items():
            if isinstance(slot, types.MemberDescriptorType) and not _is_others(made):
                try:
                    yield name, slot.__get__(value)
                except AttributeError:
                    continue  # it has no value yet


def _is_holder(value: Any) -> bool:
    """Whether the search goes on with what a value holds."""
    kind = type(value)
    if issubclass(kind, _CONTAINERS):
        return len(value) <= _LONGEST
    if _is(value, torch.nn.Module, torch.optim.Optimizer):
        return True
    if issubclass(kind, (torch.Tensor, type, threading.Thread, dist.ProcessGroup)):
        return False
    # Hooks of a context, and contexts, hold values of one epoch, and other joinables.
    is_of_joins = hasattr(kind, "main_hook") or (
        hasattr(kind, "notify_join_context") and not hasattr(kind, "join_hook")
    )
    return not is_of_joins and (kind is types.SimpleNamespace or not _is_others(kind))


def _is_others(kind: type) -> bool:
    """Whether a class is one of torch, of Python or of the kit."""
    return str(kind.__module__).partition(".")[0] in _OTHERS_CODE


def _is(value: Any, *kinds: type) -> bool:
    """Whether a value has one of some types, also if it is a proxy that has another class."""
    return issubclass(type(value), kinds)


def _is_module(value: Any) -> bool:
    return _is(value, torch.nn.Module)


def _ids_of_submodules(value: Any) -> set[int]:
    return {id(module) for module in value.modules()} if _is_module(value) else set()
