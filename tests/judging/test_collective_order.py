"""Collectives are compared between ranks and between runs, on records written by hand."""

from typing import Any

from conformance.judging.collective_order import changed_order, disagreement, order_of_groups
from conformance.records.files import DONE
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS
from conformance.scenarios.long_runs import ENDURANCE


def run(*ranks: list[dict[str, Any]], stopped: str = "ended") -> Run:
    """Return a run whose ranks issued these collectives, each in a call of its own."""
    records = []
    for number, collectives in enumerate(ranks):
        events: list[dict[str, Any]] = []
        for call, collective in enumerate(collectives):
            common = {"step": call, "call": call}
            events.append({"event": "call", **common, "index": 0})
            if collective:
                events.append({"event": "collective", **common, **collective})
            events.append({"event": "returned", **common})
        events.append({"event": "end", "tensors": 0})
        records.append(RankRecord(number, events, exit=DONE if stopped == "ended" else None))
    return Run(BUCKETS, len(ranks), records, stopped=stopped)


def issued(
    what: str, group: tuple[int, ...] = (0, 1), named: str = "0", callback: bool = False
) -> dict[str, Any]:
    """Return a collective, as the event that a rank records of it."""
    return {
        "what": what,
        "group": list(group),
        "named": named,
        "inside": True,
        "callback": callback,
    }


def test_ranks_that_agree() -> None:
    same = [issued("allreduce SUM 4 float32"), issued("barrier")]
    assert disagreement(run(same, same)) is None


def test_the_first_difference_is_named() -> None:
    one = [issued("barrier"), issued("allgather 4 float32")]
    other = [issued("barrier"), issued("allgather 5 float32")]
    assert disagreement(run(one, other)) == (
        "ranks disagree in collective 2 of the group of ranks 0, 1: "
        "rank 0 issues allgather 4 float32 (step 1, bucket 0), "
        "rank 1 allgather 5 float32 (step 1, bucket 0)"
    )


def test_groups_are_compared_by_themselves() -> None:
    """Ranks 0 and 1 use two groups in different orders, and know them by different names."""
    one = issued("barrier", named="3")
    other = issued("allreduce SUM 1 int64", (0, 1, 2), "5")
    renamed = [other | {"named": "6"}, one | {"named": "4"}]
    assert disagreement(run([one, other], renamed, [other])) is None


def test_two_groups_of_the_same_ranks() -> None:
    first = issued("barrier", named="1")
    second = issued("allreduce SUM 1 int64", named="2")
    longer = second | {"what": "allreduce SUM 2 int64"}
    text = disagreement(run([first, second], [first, longer]))
    assert "(number 2 of these ranks): rank 0 issues allreduce SUM 1 int64" in text


def test_a_rank_that_stays_out() -> None:
    text = disagreement(run([issued("barrier"), issued("barrier")], [issued("barrier"), {}]))
    assert text.endswith("rank 0 issues barrier (step 1, bucket 0), rank 1 none")


def test_a_rank_that_has_not_come_so_far() -> None:
    """In a failed run ranks end at different places: that is no disagreement."""
    hung = run([issued("barrier"), issued("barrier")], [issued("barrier")], stopped="hang")
    assert disagreement(hung) is None


def test_two_groups_of_the_same_ranks_in_another_order() -> None:
    """Their names distinguish them: ranks agree within each, and use them in different orders."""
    first = issued("allreduce 4 float32", named="1")
    second = issued("allreduce 5 float32", named="2")
    swapped = run([first, second], [second, first])
    assert disagreement(swapped) is None
    assert order_of_groups(swapped) == (
        "rank 0 issues allreduce 4 float32 (step 0, bucket 0) on the group of ranks 0, 1, "
        "and rank 1 allreduce 5 float32 (step 0, bucket 0) "
        "on the group of ranks 0, 1 (number 2 of these ranks) first"
    )


def test_groups_that_two_ranks_do_not_share_may_come_in_any_order() -> None:
    world = issued("barrier", (0, 1, 2), "0")
    left = issued("barrier", (0, 1), "1")
    right = issued("barrier", (1, 2), "2")
    shared_by_1_and_2 = run([world, left], [right, world, left], [world, right])
    assert order_of_groups(shared_by_1_and_2) is not None
    assert order_of_groups(run([world, left], [world, left, right], [world, right])) is None
    assert order_of_groups(run([left], [right, left], [right])) is None


def test_collectives_in_another_order_in_another_process() -> None:
    one = issued("allreduce SUM 4 float32")
    other = issued("allreduce SUM 5 float32")
    assert changed_order(run([one, other]), run([one, other])) is None
    text = changed_order(run([one, other]), run([other, one]))
    assert text.startswith(
        "collective 1 in the hook on rank 0 is allreduce SUM 4 float32 (step 0, bucket 0) in "
    )
    assert ", and allreduce SUM 5 float32 (step 0, bucket 0) in " in text
    assert text.endswith(", with another PYTHONHASHSEED")
    assert "collective 2 in " in changed_order(run([one, other]), run([one]))


def test_pickled_objects_may_be_longer_in_another_process() -> None:
    first = run([issued("allgather 90773 uint8")])
    longer = issued("allgather 90777 uint8")
    callback = issued("allreduce SUM 5 float32", callback=True)
    assert changed_order(first, run([longer, callback])) is None


def test_a_step_that_one_rank_leaves_out_of_a_long_run_is_named() -> None:
    def steps(left_out: int) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for step in range(9):
            events.append({"event": "step", "step": step})
            if step != left_out:
                events.append(
                    {"event": "collective", "step": step, "call": step, **issued("allreduce SUM 3")}
                )
        return events

    ranks = [RankRecord(0, steps(-1)), RankRecord(1, steps(5))]
    assert disagreement(Run(ENDURANCE, 2, ranks, stopped="hang")) == (
        "in step 5 ranks issue different numbers of collectives: rank 0 1, rank 1 0"
    )
