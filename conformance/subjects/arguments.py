"""The grammar of argument lists, which targets and claims share.

    arguments  =  [argument {"," argument} [","]]
    argument   =  value  |  name "=" value
    value      =  a Python literal, or a bare word: letters, digits, "_" and "."

A bare word means the same as a string in quotes: ``backend=gloo`` and ``backend='gloo'`` are equal.
In a target a value may be any other text, too, such as ``path=/tmp/x``; see ``any_text``.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_OPENING = "([{"
_CLOSING = ")]}"
_QUOTES = "'\""


@dataclass(frozen=True)
class Argument:
    """One argument.

    Attributes:
        name: the name before the equals sign, or None for an argument by position.
        value: the literal; or the text, if it is a word.
        text: the argument as typed.
    """

    name: str | None
    value: Any
    text: str


def parse_arguments(text: str, *, any_text: bool = False) -> list[Argument]:
    """Parse a list of arguments.

    Args:
        text: the list, without parentheses around it.
        any_text: a value may be any text; otherwise it is a literal or a bare word.

    Raises:
        ValueError: an argument is empty, or its value is neither a literal nor a bare word.
    """
    parts = split_at_commas(text)
    if not parts[-1]:
        parts.pop()  # a trailing comma, or no arguments at all
    return [_parse_argument(part, any_text) for part in parts]


def _parse_argument(text: str, any_text: bool) -> Argument:
    name, equals, value = text.partition("=")
    name = name.strip()
    # A string may contain an equals sign: 'a=b' is a value, not an argument with a name.
    if equals and name.isidentifier():
        return Argument(name, _parse_value(value.strip(), any_text), text)
    return Argument(None, _parse_value(text, any_text), text)


def _parse_value(text: str, any_text: bool) -> Any:
    try:
        # Not eval: the judging process runs no code that a subject's strings contain.
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if any_text or _WORD.fullmatch(text):
            return text
        raise ValueError(f"cannot read {text!r}: type a number, a word, True or False") from None


def split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes, and strip the parts.

    A bracket or a quote that is never closed reaches to the end of the text.
    """
    parts = []
    depth = 0
    quote = ""
    escaped = False
    start = 0
    for index, char in enumerate(text):
        if quote:
            if char == quote and not escaped:
                quote = ""
            escaped = char == "\\" and not escaped
        elif char in _QUOTES:
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def write_named(options: Iterable[tuple[str, Any]]) -> list[str]:
    """Return arguments with names as text that parses to the same values."""
    return [f"{name}={value!r}" for name, value in options]


def write_call(name: str, *arguments: str) -> str:
    """Return ``name(argument, ...)``, or the name alone if there are no arguments."""
    inside = ", ".join(argument for argument in arguments if argument)
    return f"{name}({inside})" if inside else name
