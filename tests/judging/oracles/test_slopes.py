"""Growth is found by counts, whatever their level; caches that fill up are none."""

import random
from collections.abc import Callable

import pytest

from conformance.judging.oracles.slopes import require_no_growth
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord

ROUNDS = 1200


def failures(name: str, count: Callable[[int], int]) -> list[str]:
    """Return the failures if ``count`` returns the count of a name after a step."""
    steps = [place * (ROUNDS - 1) // 12 for place in range(13)]
    events = [
        {"event": "checkpoint", "step": step, "time": 0.0, name: count(step)} for step in steps
    ]
    found = Found()
    require_no_growth(RankRecord(0, events=events), [name], found)
    return [failure.actual for failure in found.failures]


@pytest.mark.parametrize("every", [1, 7, 50, 99, 100])
@pytest.mark.parametrize("name", ["descriptors", "tasks", "groups", "children", "files", "keys"])
def test_one_more_at_every_so_many_steps_is_growth(name: str, every: int) -> None:
    for phase in range(0, every, 9):
        assert failures(name, lambda step, phase=phase: 40 + (step + phase) // every)


def test_one_object_or_tensor_a_step_is_growth() -> None:
    assert failures("blocks", lambda step: 100_000 + step)
    assert failures("memory", lambda step: 10_000_000 + 400 * step)


def test_a_cache_that_fills_up_is_no_growth() -> None:
    for name in ("descriptors", "blocks", "memory"):
        assert not failures(name, lambda step: 1000 * min(step, 390))


def test_counts_that_come_and_go_are_no_growth() -> None:
    draws = random.Random(5)
    for _ in range(200):
        assert not failures("tasks", lambda step: 12 + draws.randrange(2))
        assert not failures("blocks", lambda step: 100_000 + draws.randrange(3000))
        assert not failures("memory", lambda step: 10_000_000 + draws.randrange(100_000))


def test_records_without_a_newer_count_are_judged_by_the_others() -> None:
    events = [
        {"event": "checkpoint", "step": step, "time": 0.0, "files": step} for step in range(13)
    ]
    found = Found()
    require_no_growth(RankRecord(0, events=events), ["files", "keys"], found)
    assert len(found.failures) == 1


def test_the_failure_names_the_steps_and_the_thing() -> None:
    (actual,) = failures("groups", lambda step: step // 50)
    assert actual.startswith("rank 0: groups grow by 2 to 2 in each interval of 100 steps")
    assert actual.endswith("from step 399 to step 1199")
