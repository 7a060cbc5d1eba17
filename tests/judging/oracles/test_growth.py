"""Growth of counts and of memory, on records written by hand."""

from collections.abc import Sequence

import pytest

from conformance.judging.oracles.growth import (
    COUNTED,
    growing_counts,
    judges_counts,
    lasting,
    memory_growth,
)
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.hook import LONG
from conformance.subjects.claims import Claims, parse_claims
from tests.made_runs import event


def counted(values: Sequence[int], made: Sequence[int] = ()) -> tuple[Run, RankRecord]:
    """Return a rank whose descriptors take these values before the first step and after each."""
    rank = RankRecord(0)
    for step, value in enumerate(values, -1):
        numbers = {**dict.fromkeys(COUNTED, 3), "descriptors": value}
        rank.events.append(event("counts", step, **numbers))
    rank.events += [event("made", step) for step in made]
    return Run(LONG, 1, [rank]), rank


def grown(values: Sequence[int], claims: str = "exact", made: Sequence[int] = ()) -> list[str]:
    run, rank = counted(values, made)
    return [str(growth) for growth in growing_counts(run, rank, parse_claims(claims))]


def test_the_lasting_part_is_what_stays_to_the_end() -> None:
    assert lasting([1, 5, 2, 4, 3, 3]) == [1, 2, 2, 3, 3, 3]
    assert lasting([]) == []


@pytest.mark.parametrize(
    "values",
    [
        [7] * 7,
        [7, 9, 12, 12, 12, 12, 12],  # at the first step, and with the final buckets
        [7, 7, 7, 7, 8, 8, 8],  # once, later
        [7, 9, 7, 9, 7, 9, 7],  # for the length of a step
        [7, 7, 7, 8, 9, 9, 7],  # not for good
    ],
)
def test_what_is_made_once_does_not_grow(values: list[int]) -> None:
    assert grown(values) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (range(7, 14), "from 9 to 13, at steps 2, 3, 4, 5"),
        ([7, 7, 7, 8, 8, 8, 9], "from 7 to 9, at steps 2, 5"),
        ([7, 7, 7, 7, 9, 8, 11, 10], "from 7 to 10, at steps 3, 5"),
    ],
)
def test_what_is_made_again_grows(values: Sequence[int], said: str) -> None:
    assert grown(values) == [f"open descriptors grew {said}"]


def test_each_object_may_open_something_once() -> None:
    """As averagers of two models do, each at its first average."""
    once_each = [7, 7, 7, 8, 8, 8, 9]
    two_before = [event("made", -1, objects=1)] * 2
    one_later = [event("made", -1, objects=1), event("made", 1, objects=1)]
    for values, made, is_right in (
        (once_each, two_before, True),
        (once_each, one_later, False),
        (range(7, 14), two_before, False),
    ):
        run, rank = counted(values)
        rank.events += made
        assert (list(growing_counts(run, rank, Claims())) == []) == is_right


def test_a_warm_up_is_not_judged_and_neither_are_new_objects() -> None:
    values = list(range(7, 14))
    assert grown(values, "compressed, warmup(4)") == []
    assert grown(values, made=range(6)) == []


def test_a_short_run_shows_nothing() -> None:
    assert not judges_counts(counted([1, 1, 1, 1])[1], Claims())
    assert judges_counts(counted([1, 1, 1, 1, 1])[1], Claims())


def memory(values: Sequence[int], claims: str = "exact") -> dict[str, bool]:
    """Return for each sort of memory whether its growth is within the limit."""
    rank = RankRecord(0)
    for step, value in enumerate(values):
        rank.events.append(event("call", step, call=step, numel=20_097))
        rank.events.append(event("memory", step, tensors=value, allocated=value))
    found = memory_growth(Run(LONG, 1, [rank]), rank, parse_claims(claims))
    return {growth.name: growth.grown <= growth.limit for growth in found}


def test_memory_that_stays_or_varies_holds() -> None:
    fine = {"tensors": True, "allocated": True}
    assert memory([80_000] * 12) == fine
    assert memory([0, 80_000, *[160_000] * 10]) == fine
    assert memory([80_000, 160_000] * 6) == fine
    assert memory([80_000 + 40 * step for step in range(12)]) == fine


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_a_leak_shows_if_not_every_step_leaks(every: int) -> None:
    leak = [20_000 * (step // every) for step in range(12)]
    assert memory(leak)["tensors"] is False
    assert memory([10 * bytes_ for bytes_ in leak])["allocated"] is False


def test_a_lossy_hook_may_hold_half_a_model_back() -> None:
    filling = [min(35_000, 5_000 * step) for step in range(12)]
    assert memory(filling)["tensors"] is False
    assert memory(filling, "compressed")["tensors"] is True
    assert memory([50_000 * step for step in range(12)], "compressed")["tensors"] is False
