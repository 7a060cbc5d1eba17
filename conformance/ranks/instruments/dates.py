"""Dates that differ between ranks, for the subject alone. Runs in ranks only.

``datetime.now()`` is written in C, and cannot be replaced in its class. The module ``datetime``
gets subclasses in place of ``datetime`` and ``date`` before the subject is imported. Objects of the
classes of C, which torch or Python's own library may have made, count as instances of the
subclasses, and objects of the subclasses are instances of the classes of C. Pickle finds a subclass
under the name of its class, and so writes objects that any process can read.
"""

import datetime
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_DATETIME = datetime.datetime
_DATE = datetime.date


def replace_dates(ahead: Callable[[FrameType], float]) -> None:
    """Replace the classes in the module ``datetime``.

    Args:
        ahead: returns by how many seconds the clock of the calling code is ahead.
    """

    class OfAnyDate(type):
        """The class of both subclasses."""

        def __instancecheck__(cls, instance: object) -> bool:
            return cls.__subclasscheck__(type(instance))

        def __subclasscheck__(cls, subclass: type) -> bool:
            # A class that is derived from a replacement has subclasses of its own alone.
            replaced = cls.__dict__.get("_replaces")
            return issubclass(subclass, replaced) if replaced else cls in subclass.__mro__

    def advanced(now: Any, frame: FrameType) -> Any:
        return now + datetime.timedelta(seconds=ahead(frame))

    class Datetime(_DATETIME, metaclass=OfAnyDate):
        """``datetime`` on the rank's own clock."""

        _replaces = _DATETIME

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return advanced(super().now(tz), sys._getframe(1))

        @classmethod
        def utcnow(cls) -> Any:
            return advanced(super().utcnow(), sys._getframe(1))

        @classmethod
        def today(cls) -> Any:
            return advanced(super().today(), sys._getframe(1))

    class Date(_DATE, metaclass=OfAnyDate):
        """``date`` on the rank's own clock."""

        _replaces = _DATE

        @classmethod
        def today(cls) -> Any:
            day = advanced(_DATETIME.now(), sys._getframe(1))
            return cls(day.year, day.month, day.day)

    for name, replacement in (("datetime", Datetime), ("date", Date)):
        replacement.__name__ = replacement.__qualname__ = name
        replacement.__module__ = "datetime"
        setattr(datetime, name, replacement)
