"""Arguments of a target that name members of enums, such as ``qtype=FP16``. Runs in ranks only."""

import enum
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

from conformance.errors import TargetError


def with_enum_members(
    function: Callable[..., Any], arguments: dict[str, Any], enums: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the arguments with the names of enum members replaced by the members.

    The enum is the one in the parameter's annotation or default.

    Args:
        enums: parameters that take a member of an enum of the function's module, if neither
            annotation nor default names an enum.

    Raises:
        TargetError: there is no such member.
    """
    return {
        name: _member(function, name, value, name in enums) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


def _member(function: Callable[..., Any], name: str, value: str, is_member: bool) -> Any:
    enums = _declared_enums(function, name)
    if not enums and is_member:
        enums = _module_enums(function)
    for one in enums:
        # ``DQuantType.FP16`` names the same member as ``FP16``.
        if (member := one.__members__.get(value.rpartition(".")[2])) is not None:
            return member
    if enums:
        known = "; ".join(f"{one.__name__} has {', '.join(one.__members__)}" for one in enums)
        raise TargetError(f"{name}={value}: no such member; {known}")
    return value


def _declared_enums(function: Callable[..., Any], name: str) -> list[type[enum.Enum]]:
    """Return the enums in a parameter's annotation or default."""
    annotated = function.__init__ if inspect.isclass(function) else function
    try:
        parameter = inspect.signature(function).parameters.get(name)
        hint = typing.get_type_hints(annotated).get(name)
    except (NameError, TypeError, ValueError):
        return []
    default = type(parameter.default) if parameter else None
    return [one for one in (hint, *typing.get_args(hint), default) if _is_enum(one)]


def _module_enums(function: Callable[..., Any]) -> list[type[enum.Enum]]:
    """Return the enums in a function's module."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    values = vars(module).values() if module else ()
    return [one for one in values if _is_enum(one) and one.__members__]


def _is_enum(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, enum.Enum)
