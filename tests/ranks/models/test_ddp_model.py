"""The names under which hooks are registered."""

import functools
from typing import Any

from conformance.ranks.models.ddp_model import _named


class Callable:
    def __call__(self, state: Any, bucket: Any) -> None: ...


def function(scale: float, state: Any, bucket: Any) -> None: ...


def test_a_callable_object_has_the_name_of_its_class() -> None:
    named = _named(Callable())
    assert (named.__module__, named.__qualname__) == (__name__, "Callable")


def test_a_partial_function_has_the_name_of_the_function() -> None:
    named = _named(functools.partial(function, 2.0))
    assert (named.__module__, named.__qualname__) == (__name__, "function")
