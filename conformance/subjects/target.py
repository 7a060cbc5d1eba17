"""TODO: conformance/subjects/target.py."""

import ast
import re
from dataclasses import dataclass, field
from typing import Any

from conformance.errors import UsageError


@dataclass(frozen=True)
class Target:
    """``module:attribute[,key=value...]`` taken apart.

    ``call`` is true for ``module:attribute()`` and for every target with keyword arguments.
    """

    module: str
    attribute: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"


_TARGET = re.compile(r"^(?P<module>[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_][\w.]*)(?P<call>\(\))?$")


def parse_target(text: str, option: str) -> Target:
    """Parse ``module:attribute[,key=value...]``; values are Python literals, or else strings.

    Raises:
        UsageError: the text has another form.
    """
    head, *pairs = _split(text)
    match = _TARGET.match(head.strip())
    if not match:
        raise UsageError(f"{option}: {text!r} is not module:attribute[,key=value...], e.g. mypkg.hooks:my_hook,rank=2")
    kwargs = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UsageError(f"{option}: {pair.strip()!r} in {text!r} is not key=value")
        kwargs[key.strip()] = _literal(value.strip())
    return Target(match["module"], match["attribute"], kwargs, call=bool(match["call"] or kwargs))


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
