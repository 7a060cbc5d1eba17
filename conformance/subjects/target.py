"""The strings that name objects of Python: ``module:attribute[,key=value...]``."""

import re
from dataclasses import dataclass, field
from typing import Any

from conformance.errors import UsageError
from conformance.subjects.arguments import parse_arguments, write_named

_HEAD = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_][\w.]*)(?P<call>\(\))?")


@dataclass(frozen=True)
class Target:
    """A parsed target.

    Attributes:
        module: the module to import.
        attribute: the name in the module, with dots for attributes of attributes.
        kwargs: the keyword arguments to call the object with.
        call: the object is to be called: the target ends in ``()``, or has keyword arguments.
    """

    module: str
    attribute: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"


def parse_target(text: str, option: str) -> Target:
    """Parse ``module:attribute[,key=value...]``, or ``module:attribute()``.

    Values are Python literals; any other text is a string. If a key is given twice, its last value
    counts.

    Args:
        text: the target.
        option: the option of the command line that named it, for messages.

    Raises:
        UsageError: the text has another form.
    """
    head, _, rest = text.partition(",")
    match = _HEAD.fullmatch(head.strip())
    if not match:
        raise UsageError(
            f"{option}: {text!r} is not module:attribute[,key=value...], "
            "e.g. mypkg.hooks:my_hook,rank=2"
        )
    if text.rstrip().endswith(","):
        # The text is the subject's name in certificates, so that each subject has one spelling.
        raise UsageError(f"{option}: {text!r} ends with a comma; leave it out")
    kwargs = {}
    for argument in parse_arguments(rest, any_text=True):
        if argument.name is None:
            raise UsageError(
                f"{option}: {argument.text!r} in {text!r} is not key=value; "
                f"type e.g. {match['module']}:{match['attribute']},rank=2"
            )
        kwargs[argument.name] = argument.value
    call = bool(match["call"] or kwargs)
    return Target(match["module"], match["attribute"], kwargs, call)


def write_target(head: str, kwargs: dict[str, Any]) -> str:
    """Return the target that calls ``module:attribute`` with keyword arguments."""
    return ",".join([head, *write_named(kwargs.items())])
