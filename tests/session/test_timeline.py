"""The timeline of a failed run, from records written by hand."""

from conformance.judging.verdict import Judgement, Verdict
from conformance.records.files import DONE
from conformance.session.timeline import Timeline, timeline
from tests.judging.test_collective_order import issued, run
from tests.made_runs import broken_run, made_run

FAILED = {"values@2": {"verdict": "fail", "reason": ""}}
JUDGEMENT = Judgement("1.5", Verdict.FAIL, runs=FAILED)


def texts(shown: Timeline) -> list[list[str | None]]:
    return [[call.text if call else None for call in row.calls] for row in shown.rows]


def test_ranks_part_at_their_first_different_collective() -> None:
    same = [issued(f"broadcast {size} float32") for size in range(1, 7)]
    one = [*same, issued("allreduce SUM 7 float32"), issued("barrier")]
    other = [*same, issued("allreduce SUM 8 float32"), issued("barrier")]
    again = run(one, other, stopped="hang")
    shown = timeline(JUDGEMENT, {}, {"values@2": again})
    assert shown is not None
    assert [row.number for row in shown.rows] == [4, 5, 6, 7, 8]
    assert [row.number for row in shown.rows if row.parts] == [7]
    assert texts(shown)[3] == ["allreduce 7 float32", "allreduce 8 float32"]
    assert shown.parted.startswith("ranks disagree in collective 7 of the group of ranks 0, 1")
    assert shown.calls == 8


def test_a_collective_that_one_rank_left_out_parts_ranks_that_ended() -> None:
    shown = timeline(JUDGEMENT, {"values@2": run([issued("barrier")], [{}])}, {})
    assert shown is not None
    assert texts(shown) == [["barrier", None]]
    assert shown.rows[0].parts


def test_groups_of_other_ranks_do_not_part() -> None:
    one = run([issued("barrier", (0,))], [issued("allreduce SUM 1 float32", (1,))])
    shown = timeline(JUDGEMENT, {"values@2": one}, {})
    assert shown is not None
    assert not shown.parted
    assert shown.rows == ()


def test_a_run_without_collectives_shows_the_calls_of_the_hook() -> None:
    shown = timeline(JUDGEMENT, {"values@2": broken_run(exit=-11)}, {})
    assert shown is not None
    assert texts(shown) == [["hook called", "hook called"], ["hook returned", None]]
    assert shown.ends == (
        "died of signal 9",
        "died of signal 11",
    )
    assert not shown.parted


def test_ranks_that_made_the_same_calls_need_no_rows() -> None:
    whole = made_run()
    for rank in whole.ranks:
        rank.exit = DONE
    shown = timeline(JUDGEMENT, {"values@2": whole}, {})
    assert shown is not None
    assert shown.rows == ()
    assert shown.ends == ("came to its end", "came to its end")


def test_a_rule_without_a_failed_run_has_no_timeline() -> None:
    assert timeline(Judgement("2.1", Verdict.FAIL), {}, {}) is None
