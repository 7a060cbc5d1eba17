"""The state of joinables whose integers are large, on runs written by hand."""

from dataclasses import replace

import expecttest

from conformance.judging.oracles.join_counts import require_same_counts
from conformance.judging.verdict import Found
from conformance.records.rank_record import Event
from conformance.records.run import Run
from conformance.scenarios.join_draws import FLOAT64_TRIAL, NONE_RAISED
from conformance.scenarios.joins_in_training import COUNTS
from tests.judging.oracles import test_join as joins
from tests.made_runs import event, read_failures


def counted(*names: str, error: str = "", error_in: int = 1) -> Run:
    """Return a run of a joinable with integers that count up.

    Args:
        names: of the integers.
        error: comes out of a context on all ranks.
        error_in: the number of that context.
    """
    made = joins.trained()
    for rank in made.ranks:
        rank.events.append(Event(event("counts_raised", 0, names=list(names), added=2**28)))
        for context in (0, 1):
            text = error if context == error_in else ""
            rank.events.append(Event(event("came_out", context, error=text, same=False)))
    return replace(made, scenario=COUNTS)


def found_in(made: Run) -> Found:
    found = Found()
    require_same_counts(made, found)
    return found


def test_the_same_state_is_right() -> None:
    found = found_in(counted("count"))
    assert found.checks
    assert not found.failures


def test_reasons_not_to_judge() -> None:
    reasons = [
        found_in(counted()).not_applicable,
        found_in(counted("place", error="IndexError: index 268435456")).not_applicable,
    ]
    assert reasons == [
        "it has no integers, and no whole numbers in float64, that count up in each step",
        "it refuses large numbers that count up: IndexError: index 268435456",
    ]


def test_failures_are_described() -> None:
    differs = counted("count")
    for one in differs.ranks[1].all("state_of_joinable", step=1, when="left"):
        one["digests"] = {"p0": "other"}
    failures = [
        *found_in(differs).failures,
        *found_in(counted("count", error="OverflowError: too large", error_in=0)).failures[:1],
    ]
    expecttest.assert_expected_inline(
        read_failures(failures),
        """\
Expected: the same p0 on all ranks
Actual: rank 0, context 1 with inputs (3, 3): p0 differs on ranks [1]
Likely cause: an integer beyond 2**24 is handed out, or counted, in float32
Expected: no exception
Actual: context 0: OverflowError: too large""",
    )


def tallied(after_join: str, without_large: str = "4.0") -> Run:
    """Return a run of a joinable with a count in float64 among its attributes.

    Args:
        after_join: the count on the second rank, after a join with a large one.
        without_large: the count there, after a join of uneven inputs with a small one.
    """
    made = joins.trained()
    for rank in made.ranks:
        for one in rank.events:
            if one["step"] == 1:
                one["step"] = FLOAT64_TRIAL
        rank.events.append(Event(event("counts_raised", FLOAT64_TRIAL, names=["tally"], added=3)))
        is_second = rank.rank == 1
        for context, value in ((FLOAT64_TRIAL, after_join), (NONE_RAISED, without_large)):
            values = {"tally": value if is_second else value.replace("5", "4")}
            rank.events.append(Event(event("counts_left", context, values=values)))
            rank.events.append(Event(event("came_out", context, error="", same=False)))
        rank.events.append(Event(event("came_out", 0, error="", same=False)))
    return replace(made, scenario=COUNTS)


def test_numbers_are_the_same_as_far_as_they_are_without_large_ones() -> None:
    assert not found_in(tallied("9.0")).failures
    assert not found_in(tallied("5.0", without_large="5.0")).failures
    expecttest.assert_expected_inline(
        read_failures(found_in(tallied("5.0")).failures),
        """\
Expected: the same tally on all ranks
Actual: context 7: tally is 4.0, 5.0 on ranks 0 to 1
Likely cause: a count in float64 is handed out, or counted, in float32 or int32""",
    )
