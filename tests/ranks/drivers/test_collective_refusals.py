"""Looking for the calls that a quantized collective refuses: which objects make them."""

import types
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from conformance.ranks.drivers._collective_refusals import Refusals
from conformance.scenarios.collective_conditions import MIXED_CALLS


class Call:
    """A call of a parameter, with tensors of as many elements as its number."""

    def __init__(self, step: int, index: int) -> None:
        self.step = step
        self.index = index
        self.is_asynchronous = True
        self.function: Any = None

    def begin(self) -> None:
        """Call the object."""
        self.function(self.index)

    def wait(self) -> None:
        """Wait for nothing."""


class OfOneShape:
    """A collective that keeps errors, and so takes tensors of one shape."""

    def __init__(self) -> None:
        self.size: int | None = None

    def __call__(self, size: int) -> None:
        if self.size not in (None, size):
            raise ValueError("another shape")
        self.size = size


def refusals(events: list[str], key_of: Any) -> Refusals:
    """Return the refusals of ``OfOneShape`` on a rank that records events by name."""
    driver: Any = types.SimpleNamespace(
        scenario=replace(MIXED_CALLS, options=("all_gather",)),
        rank=0,
        inside=lambda *_: nullcontext(),
        recorder=types.SimpleNamespace(event=lambda name, **_: events.append(name)),
        collectives=types.SimpleNamespace(take_sent=lambda: None),
    )
    call: Any = Call
    return Refusals(driver, OfOneShape, call, key_of)


@pytest.mark.parametrize("shares", [False, True])
def test_calls_share_an_object_as_those_of_the_scenario_do(shares: bool) -> None:
    events: list[str] = []
    tried = refusals(events, lambda step, index: (0, 0 if shares else index))
    calls: Any = [Call(0, 3), Call(0, 5)]
    assert tried.apart(calls) == ([calls[:1], calls[1:]] if shares else [calls])
    assert events == (["refuses_others"] if shares else [])
