"""Where ranks disagree on their collectives, on records made by hand."""

from typing import Any

from conformance.judging.collective_order import changed_order, disagreement, order_of_groups
from conformance.records.files import DONE
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS


def run(*ranks: list[dict[str, Any]], stopped: str = "ended") -> Run:
    """A run whose ranks issued these collectives, each in a call of its own."""
    records = []
    for number, collectives in enumerate(ranks):
        events: list[dict[str, Any]] = []
        for call, collective in enumerate(collectives):
            events += [{"event": "call", "step": call, "call": call, "index": 0}]
            events += [{"event": "collective", "step": call, "call": call, **collective}] if collective else []
            events += [{"event": "returned", "step": call, "call": call}]
        record = RankRecord(number, events, exit=DONE if stopped == "ended" else None)
        record.events.append({"event": "end", "tensors": 0})
        records.append(record)
    return Run(BUCKETS, len(ranks), records, stopped=stopped)


def issued(what: str, group: tuple[int, ...] = (0, 1), named: str = "0", inside: bool = True, callback: bool = False) -> dict[str, Any]:
    return {"what": what, "group": list(group), "named": named, "inside": inside, "callback": callback}


def test_ranks_that_agree() -> None:
    same = [issued("allreduce SUM 4 float32"), issued("barrier")]
    assert disagreement(run(same, same)) == ""


def test_the_first_that_differs_is_named() -> None:
    said = disagreement(run([issued("barrier"), issued("allgather 4 float32")], [issued("barrier"), issued("allgather 5 float32")]))
    assert said == (
        "ranks disagree in collective 2 of the group of ranks 0, 1: "
        "rank 0 issues allgather 4 float32 (step 1, bucket 0), rank 1 allgather 5 float32 (step 1, bucket 0)"
    )


def test_groups_are_compared_by_themselves() -> None:
    """On rank 0 the collectives of two groups come in another order than on rank 1; their names differ too."""
    one, other = issued("barrier", named="3"), issued("allreduce SUM 1 int64", (0, 1, 2), "5")
    assert disagreement(run([one, other], [other | {"named": "6"}, one | {"named": "4"}], [other])) == ""


def test_two_groups_of_the_same_ranks() -> None:
    first, second = issued("barrier", named="1"), issued("allreduce SUM 1 int64", named="2")
    assert "(number 2 of these ranks): rank 0 issues allreduce SUM 1 int64" in disagreement(
        run([first, second], [first, second | {"what": "allreduce SUM 2 int64"}])
    )


def test_a_rank_that_stays_out() -> None:
    said = disagreement(run([issued("barrier"), issued("barrier")], [issued("barrier"), {}]))
    assert said.endswith("rank 0 issues barrier (step 1, bucket 0), rank 1 none")


def test_a_rank_that_has_not_come_there_yet() -> None:
    """In a run that broke, ranks end in different places: that is no disagreement."""
    assert disagreement(run([issued("barrier"), issued("barrier")], [issued("barrier")], stopped="hang")) == ""


def test_two_groups_of_the_same_ranks_in_another_order() -> None:
    """Their names say which is which: ranks agree on each, and come to them in another order."""
    first, second = issued("allreduce 4 float32", named="1"), issued("allreduce 5 float32", named="2")
    swapped = run([first, second], [second, first])
    assert disagreement(swapped) == ""
    assert order_of_groups(swapped) == (
        "rank 0 issues allreduce 4 float32 (step 0, bucket 0) on the group of ranks 0, 1, "
        "and rank 1 allreduce 5 float32 (step 0, bucket 0) on the group of ranks 0, 1 (number 2 of these ranks) first"
    )


def test_groups_that_two_ranks_do_not_share_may_come_in_any_order() -> None:
    world, left, right = issued("barrier", (0, 1, 2), "0"), issued("barrier", (0, 1), "1"), issued("barrier", (1, 2), "2")
    assert order_of_groups(run([world, left], [right, world, left], [world, right])) != ""  # ranks 1 and 2 share two
    assert order_of_groups(run([world, left], [world, left, right], [world, right])) == ""
    assert order_of_groups(run([left], [right, left], [right])) == ""


def test_collectives_that_come_in_another_order_in_another_process() -> None:
    one, other = issued("allreduce SUM 4 float32"), issued("allreduce SUM 5 float32")
    assert changed_order(run([one, other]), run([one, other])) == ""
    said = changed_order(run([one, other]), run([other, one]))
    assert said.startswith("rank 0 issues allreduce SUM 4 float32 (step 0, bucket 0) as collective 1 in ")
    assert said.endswith("allreduce SUM 5 float32 (step 0, bucket 0)")
    assert "as collective 2 in " in changed_order(run([one, other]), run([one]))


def test_pickled_objects_may_be_longer_in_another_process() -> None:
    longer, callback = issued("allgather 90777 uint8"), issued("allreduce SUM 5 float32", callback=True)
    assert changed_order(run([issued("allgather 90773 uint8")]), run([longer, callback])) == ""
