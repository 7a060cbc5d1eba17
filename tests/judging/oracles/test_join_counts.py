"""The state of joinables whose integers are large, on runs written by hand."""

from dataclasses import replace

import expecttest

from conformance.judging.oracles.join_counts import require_same_counts
from conformance.judging.verdict import Found
from conformance.records.rank_record import Event
from conformance.records.run import Run
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
        "it has no integers that count up in each step",
        "it refuses large integers that count up: IndexError: index 268435456",
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
