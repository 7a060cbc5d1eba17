"""Words in the arguments of a target that name members of enums: ``qtype=FP16``, ``checkpoint_impl=REENTRANT``. Runs in ranks only."""

import enum
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

from conformance.errors import TargetError


def with_members(function: Callable[..., Any], arguments: dict[str, Any], enums: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return arguments with the members that words among them name, of the enum that the parameter's annotation or default says.

    Args:
        enums: parameters that are members of an enum in the function's module, where neither says so.

    Raises:
        TargetError: there is no such member.
    """
    return {name: _member(function, name, value, name in enums) if isinstance(value, str) else value for name, value in arguments.items()}


def _member(function: Callable[..., Any], name: str, word: str, is_member: bool) -> Any:
    kinds = _said(function, name) or (_near(function) if is_member else [])
    for kind in kinds:
        if (member := kind.__members__.get(word.rpartition(".")[2])) is not None:
            return member
    if kinds:
        known = "; ".join(f"{kind.__name__} has {', '.join(kind.__members__)}" for kind in kinds)
        raise TargetError(f"{name}={word}: no such member; {known}")
    return word


def _said(function: Callable[..., Any], name: str) -> list[type[enum.Enum]]:
    """Return the enums that a parameter's annotation or default says."""
    try:
        parameter = inspect.signature(function).parameters.get(name)
        hint = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function).get(name)
    except (NameError, TypeError, ValueError):
        parameter = hint = None
    candidates = [hint, *typing.get_args(hint), type(parameter.default) if parameter else None]
    return [kind for kind in candidates if inspect.isclass(kind) and issubclass(kind, enum.Enum)]


def _near(function: Callable[..., Any]) -> list[type[enum.Enum]]:
    """Return the enums in a function's module."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    found = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, enum.Enum)] if module else []
    return [kind for kind in found if kind.__members__]
