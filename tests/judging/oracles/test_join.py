"""The messages on contexts and joinables, on records written by hand."""

from typing import Any

import expecttest
import pytest

from conformance.judging.oracles import join
from conformance.judging.verdict import Found
from conformance.records.rank_record import IncompleteRecord, RankRecord
from conformance.records.run import Run
from conformance.scenarios.joinable import UNEVEN
from tests.made_runs import event, read_failures


def run(*events: dict[str, Any], is_context: bool = True) -> Run:
    """Return a run of two ranks with the same events in the first context."""
    subject = event("subject", -1, is_context=is_context)
    step = event("step", 0, kind="context")
    return Run(UNEVEN, 2, [RankRecord(rank, [subject, step, *events], exit=0) for rank in (0, 1)])


def test_hooks_and_their_arguments_are_described() -> None:
    records = run(
        event("main", 0, joinable=7),
        event("post", 0, joinable=7, last=True),
        event("main", 0, joinable=7),
    )
    found = Found()
    member = next(join.members(records))
    join.require_steps(records, member, found)
    join.require_post_hooks(records, member, found)
    join.require_no_hooks(member, found)
    join.require_keywords(records, member, found)
    join.require_some_post_hook(next(join.members(run())), found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: main hooks of joinables []
Actual: rank 0, context 0 with inputs (3, 2): main hooks of joinables [7, 7]
Expected: 3 collectives of joinable 0
Actual: rank 0, context 0 with inputs (3, 2): 0
Expected: 3 collectives of joinable 1
Actual: rank 0, context 0 with inputs (3, 2): 0
Expected: 3 collectives of joinable 2
Actual: rank 0, context 0 with inputs (3, 2): 0
Expected: post hooks of joinables [0, 1, 2], in this order
Actual: rank 0, context 0 with inputs (3, 2): post hooks of joinables [7]
Expected: post hooks after the last step
Actual: rank 0, context 0 with inputs (3, 2): one before it
Expected: no hook
Actual: rank 0, context 0 with inputs (3, 2): main_hook of joinable 7, post_hook of
    joinable 7, main_hook of joinable 7
Expected: a call of join_hook
Actual: rank 0, context 0 with inputs (3, 2): join_hook of joinable 0 was not called
Expected: a call of join_hook
Actual: rank 0, context 0 with inputs (3, 2): join_hook of joinable 1 was not called
Expected: a call of join_hook
Actual: rank 0, context 0 with inputs (3, 2): join_hook of joinable 2 was not called
Expected: post hooks
Actual: rank 0, context 0 with inputs (3, 2): none""",
    )


def test_notifications_are_described() -> None:
    collective = event("collective", 0, what="allreduce SUM 4 float32")
    records = run(
        event("takes", 0),
        collective,
        event("says", 0, own=True),
        event("takes", 0),
        event("leaving", 0),
        event("notifies", 0, joinable=7),
        collective,
        event("notified", 0),
        is_context=False,
    )
    found = Found()
    member = next(join.members(records))
    join.require_notifications(member, found)
    join.require_silent_notifications(records, member, found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: no collective before the notification
Actual: rank 0, context 0 with inputs (3, 2), step 0: allreduce SUM 4 float32 before the
    notification
Expected: one call of notify_join_context with itself
Actual: rank 0, context 0 with inputs (3, 2), step 1: 0 calls
Expected: no collective
Actual: rank 0, context 0 with inputs (3, 2): 1 in the notification of joinable 7""",
    )


def test_ranks_with_other_kinds_of_subjects_are_described() -> None:
    records = run()
    records.ranks[1].events[0] = event("subject", -1, is_context=False)
    with pytest.raises(IncompleteRecord) as caught:
        join.is_context(records)
    assert caught.value.expected == "a subject of one kind on all ranks"
    assert caught.value.actual == (
        "it is a context on ranks [0] alone, and a joinable on the others"
    )
