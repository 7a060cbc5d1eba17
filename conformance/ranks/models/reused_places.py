"""Objects at the addresses of others that are gone, for which ``id()`` is the same.

A subject that keeps something by ``id(model)`` takes a new model for an old one if it lies in the
same place in memory. That happens by chance in a long run; here it is brought about.
"""

from typing import TypeVar

Made = TypeVar("Made")

_TRIES = 10_000


def made_in_place(kind: type[Made], place: int) -> Made:
    """Return an object of a class, without a call of its ``__init__``.

    It lies at the place of an earlier one of the class, unless something else lies there by now.

    Args:
        kind: the class.
        place: the ``id`` of an object that is gone.
    """
    made = []
    for _ in range(_TRIES):
        # All are kept, so that each lies in another place.
        made.append(kind.__new__(kind))
        if id(made[-1]) == place:
            break
    return made[-1]
