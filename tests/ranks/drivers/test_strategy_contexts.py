"""Tests of the messages on what a sync strategy returns."""

from contextlib import nullcontext

import pytest

from conformance.errors import TargetError
from conformance.ranks.drivers._strategy_contexts import require_context


class Called:
    """An object that is called for each micro-batch."""

    def __call__(self) -> nullcontext[None]:
        return nullcontext()


def test_a_context_manager_is_taken() -> None:
    require_context(nullcontext(), nullcontext)


def test_a_class_whose_objects_are_called_gets_the_advice_to_name_an_object() -> None:
    with pytest.raises(TargetError, match=r"of type Called; .* name an object of Called that "):
        require_context(Called(), Called)


@pytest.mark.parametrize(
    ("value", "words"), [(None, "None"), (3, "an object of type int"), (Called(), "of type Called")]
)
def test_another_object_is_described(value: object, words: str) -> None:
    with pytest.raises(TargetError, match=f"returned .*{words}$"):
        require_context(value, len)
