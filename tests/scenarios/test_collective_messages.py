"""The messages of quantized collectives: some without rows, and complex ones."""

import itertools
from dataclasses import replace

import pytest
import torch

from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import FORMS, SUMMING
from conformance.scenarios.collective_training import (
    FIRST_WITHOUT_ROWS,
    OPERATED,
    OPERATED_FORMS,
    UNEVEN,
    WITH_CALLS_OUTSIDE,
)
from conformance.scenarios.draws import drawn


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_some_messages_have_no_rows_and_others_in_the_next_call(name: str) -> None:
    for seed, size in itertools.product(range(20), (2, 3)):
        scenario = replace(drawn(UNEVEN, seed), options=(name,))
        calls = range(len(scenario.params))
        pairs = [*itertools.product(range(size), [0] if name == "all_gather" else range(size))]
        empty = [
            {pair for pair in pairs if not messages.shape_of(scenario, size, 0, index, *pair)[0]}
            for index in calls
        ]
        assert not any(empty[:FIRST_WITHOUT_ROWS])
        for index in calls[FIRST_WITHOUT_ROWS::2]:
            assert 0 < len(empty[index]) < len(pairs)
            assert empty[index] ^ empty[index + 1] == {*pairs}
        senders = set().union(
            *(
                {
                    source
                    for source in range(size)
                    if all(p in some for p in pairs if p[0] == source)
                }
                for some in empty
            )
        )
        # Each rank has nothing to send in some call.
        assert senders == {*range(size)}


def test_complex_messages_have_two_parts() -> None:
    scenario = replace(drawn(FORMS, 0), options=("all_gather",))
    for index, spec in enumerate(scenario.params):
        made = messages.message(scenario, 2, 0, index, 1, 0)
        assert str(made.dtype) == f"torch.{spec.dtype}"
        if made.is_complex():
            parts = messages.as_reals(made)
            assert parts.shape == (2 * made.numel(),)
            assert not made.numel() or (made.imag != made.real).any()
            assert torch.equal(torch.view_as_complex(parts.view(-1, 2)), made.reshape(-1))


def test_operations_are_asked_of_sums_alone() -> None:
    for name in ("all_reduce", "scatter"):
        scenario = replace(drawn(OPERATED, 0), options=(name,))
        asked = [messages.form_of(scenario, index) for index in messages.indices(scenario, 0)]
        assert asked == (list(OPERATED_FORMS) if name in SUMMING else [])


def test_calls_outside_come_before_others_and_meanwhile() -> None:
    scenario = drawn(WITH_CALLS_OUTSIDE, 0)
    steps = range(len(scenario.steps))
    indices = range(len(scenario.params))
    moments = [
        messages.outside_too(scenario, *place) for place in itertools.product(steps, indices)
    ]
    assert {*moments} == {"before", messages.MEANWHILE, ""}
