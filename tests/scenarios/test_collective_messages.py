"""The messages of quantized collectives: some without rows, and complex ones."""

import itertools
from dataclasses import replace

import pytest
import torch

from conformance.scenarios import collective_memory as memory
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import FORMS, OF_UNEVEN_SIZES, SUMMING
from conformance.scenarios.collective_conditions import MIXED_CALLS
from conformance.scenarios.collective_training import (
    FIRST_WITHOUT_ROWS,
    OPERATED,
    OPERATED_FORMS,
    UNEVEN,
    VIEWS,
    WITH_CALLS_OUTSIDE,
    WITH_LARGE_PART,
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


@pytest.mark.parametrize("name", OF_UNEVEN_SIZES)
def test_uneven_sizes_change_from_step_to_step(name: str) -> None:
    """In every other exchange a rank sends and gets as many rows in all as before."""
    for seed, size in itertools.product(range(20), (2, 3)):
        scenario = replace(drawn(UNEVEN, seed), options=(name,))
        places = range(1) if name == "all_gather" else range(size)
        for index in range(FIRST_WITHOUT_ROWS):
            rows = [
                [
                    [messages.shape_of(scenario, size, step, index, source, to)[0] for to in places]
                    for source in range(size)
                ]
                for step in (0, 1)
            ]
            assert rows[0] != rows[1]
            if index == WITH_LARGE_PART:
                continue
            for of_step in [] if name == "all_gather" else rows:
                sent, got = map(sum, of_step), map(sum, zip(*of_step, strict=True))
                assert {a == b for a, b in zip(sent, got, strict=True)} == {index % 2 == 1}
            if index % 2 and name != "all_gather":
                sums = [
                    [*map(sum, of_step), *map(sum, zip(*of_step, strict=True))] for of_step in rows
                ]
                assert sums[0] == sums[1]


def test_one_rank_has_a_larger_part_than_others() -> None:
    """All parts of other ranks are small, so that ranks disagree on the size of the longest."""
    for seed, size in itertools.product(range(20), (2, 3)):
        scenario = replace(drawn(UNEVEN, seed), options=("all_to_all",))
        pairs = list(itertools.product(range(size), repeat=2))
        rows = {
            pair: messages.shape_of(scenario, size, 0, WITH_LARGE_PART, *pair)[0] for pair in pairs
        }
        ((source, to),) = (pair for pair in pairs if rows[pair] == max(rows.values()))
        assert source == to
        assert sorted(rows.values())[-2] <= max(rows.values()) // 8


def test_up_to_three_uneven_calls_are_under_way_together() -> None:
    for seed in range(20):
        scenario = replace(drawn(UNEVEN, seed), options=("all_to_all",))
        lengths = set()
        for step in (0, 1):
            runs = messages.runs(scenario, step)
            assert [i for run in runs for i in run] == messages.indices(scenario, step)
            together = [run for run in runs if messages.is_asynchronous(scenario, step, run[0])]
            assert all(messages.is_asynchronous(scenario, step, i) for run in together for i in run)
            assert all(len(run) == 1 for run in runs if run not in together)
            lengths |= {len(run) for run in together}
        assert lengths <= {1, 2, 3}
        assert max(lengths) > 1
    scattered = replace(scenario, options=("scatter",))
    assert {len(run) for run in messages.runs(scattered, 0)} == {1}


def test_mixed_calls_are_begun_in_drawn_orders_and_in_runs() -> None:
    scenario = replace(drawn(MIXED_CALLS, 0), options=("all_reduce",))
    runs = [run for step in range(16) for run in messages.runs(scenario, step)]
    assert {len(run) for run in runs} == {1, 2, 3, 4}
    for step in range(16):
        ran = [i for run in messages.runs(scenario, step) for i in run]
        assert ran != sorted(ran) == messages.indices(scenario, step)
    asked = [
        {messages.form_of(scenario, i) for i in run if messages.is_asynchronous(scenario, step, i)}
        for step in range(16)
        for run in messages.runs(scenario, step)
    ]
    # Sums and averages are under way at once.
    assert {"", "average"} in asked


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


def test_parts_of_buffers_are_in_all_places_in_calls_of_both_kinds() -> None:
    """Some asynchronous calls share memory; some synchronous calls have tensors behind each
    other.
    """
    for seed in range(20):
        scenario = replace(drawn(VIEWS, seed), options=("all_gather",))
        seen = set()
        for step in range(len(scenario.steps)):
            runs = messages.runs(scenario, step)
            assert [index for run in runs for index in run] == [*range(6)]
            assert max(map(len, runs)) == 3 or step
            places = [memory.place_in_buffer(scenario, step, index) for index in range(6)]
            assert sorted(places) == [memory.ADJACENT] * 2 + [memory.APART] * 3 + [memory.WHOLE]
            waits = [messages.is_asynchronous(scenario, step, index) for index in range(6)]
            assert sum(waits) == 3
            seen |= {
                (waits[index], memory.is_in_place(scenario, step, index)) for index in range(6)
            }
        assert len(seen) == 4
