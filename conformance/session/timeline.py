"""The timeline of a failed run: the calls of every rank, in the order of its record.

Collectives are shown if the run has them on record, and calls of the hook otherwise. The order is
that of the records, not of clocks: row n has the n-th call of each rank. Ranks part in the first
row in which two ranks of one group make different calls, or in which one of them makes none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.judging.collective_order import disagreement
from conformance.judging.verdict import Judgement, Verdict
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run

_BEFORE = 3
_ROWS = 9
_MOST_RANKS = 8
_LONGEST_TEXT = 80
_HOOK_EVENTS = {"call": "hook called", "returned": "hook returned", "raised": "hook raised"}


@dataclass(frozen=True)
class Call:
    """One call of one rank.

    Attributes:
        text: the call in words.
        place: its step and bucket.
        group: the ranks that take part.
    """

    text: str
    place: str
    group: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """The n-th call of each rank.

    Attributes:
        number: n, from 1.
        calls: by rank, in order; None if a rank made no n-th call.
        parts: whether ranks part here.
    """

    number: int
    calls: tuple[Call | None, ...]
    parts: bool


@dataclass(frozen=True)
class Timeline:
    """The calls of the ranks of one run.

    Attributes:
        run: the name of the run; a repeated run has a name of its own.
        ranks: the shown ranks.
        ends: for each of them, the end of its process in words.
        rows: the shown rows; () if all ranks made the same calls and came to their end.
        calls: the number of calls of the rank with the most.
        hidden_ranks: the number of ranks that are not shown.
        parted: the place at which ranks parted, in words; empty if they did not.
    """

    run: str
    ranks: tuple[int, ...]
    ends: tuple[str, ...]
    rows: tuple[Row, ...]
    calls: int
    hidden_ranks: int
    parted: str


def timeline(
    judgement: Judgement, runs: Mapping[str, Run], explained: Mapping[str, Run]
) -> Timeline | None:
    """Return the timeline of the first failed run of a rule, or None if there is no such run.

    Args:
        judgement: the judgement on the rule.
        runs: the runs of the session by name.
        explained: by the name of a failed run, its repetition with collectives on record.
    """
    for name, entry in judgement.runs.items():
        if entry["verdict"] != str(Verdict.FAIL):
            continue
        for part in name.split(" and "):
            run = explained.get(part) or runs.get(part)
            if run and run.ranks:
                return _of_run(run)
    return None


def _of_run(run: Run) -> Timeline | None:
    by_rank = [_collectives(rank) for rank in run.ranks]
    if not any(by_rank):
        by_rank = [_hook_calls(rank, run) for rank in run.ranks]
    longest = max(map(len, by_rank))
    if not longest:
        return None
    parts = next((n for n in range(longest) if _part_at(by_rank, n, run.finished)), None)
    shown = range(0)
    if parts is not None:
        begin = max(0, parts - _BEFORE)
        shown = range(begin, min(longest, begin + _ROWS))
    elif not run.finished:
        shown = range(max(0, longest - _ROWS), longest)
    ranks = run.ranks[:_MOST_RANKS]
    rows = [
        Row(
            number + 1,
            tuple(_at(calls, number) for calls in by_rank[:_MOST_RANKS]),
            parts=number == parts,
        )
        for number in shown
    ]
    return Timeline(
        run.name,
        tuple(rank.rank for rank in ranks),
        tuple(_end_of(rank) for rank in ranks),
        tuple(rows),
        longest,
        len(run.ranks) - len(ranks),
        (disagreement(run) or f"ranks part in call {parts + 1}") if parts is not None else "",
    )


def _part_at(by_rank: Sequence[Sequence[Call]], number: int, finished: bool) -> bool:
    """Whether ranks of one group part in their n-th call.

    In a run that broke, a rank without a call may only have been stopped earlier.
    """
    calls = {rank: _at(seq, number) for rank, seq in enumerate(by_rank)}
    for rank, call in calls.items():
        for other, others_call in calls.items():
            if call is None or other not in call.group or rank == other:
                continue
            if others_call is None and finished:
                return True
            shares = others_call is not None and others_call.group == call.group
            if others_call is not None and shares and others_call.text != call.text:
                return True
    return False


def _at(calls: Sequence[Call], number: int) -> Call | None:
    return calls[number] if number < len(calls) else None


def _collectives(rank: RankRecord) -> list[Call]:
    """Return the collectives of a rank."""
    buckets = {event["call"]: event.get("index") for event in rank.all("call")}
    calls = []
    for event in rank.all("collective"):
        bucket = buckets.get(event["call"])
        place = f"step {event['step']}" + (f", bucket {bucket}" if bucket is not None else "")
        if not event["inside"]:
            place += ", outside the hook"
        calls.append(Call(_text(event["what"]), place, tuple(event["group"])))
    return calls


def _hook_calls(rank: RankRecord, run: Run) -> list[Call]:
    """Return the calls of the hook on a rank, with their ends."""
    group = run.group(rank.rank)
    buckets = {event["call"]: event.get("index") for event in rank.all("call")}
    calls = []
    for event in rank.events:
        words = _HOOK_EVENTS.get(event["event"])
        if words is None:
            continue
        if event["event"] == "raised":
            words += f" {event.get('type', '')}"
        place = f"step {event['step']}, bucket {buckets.get(event.get('call'), '?')}"
        calls.append(Call(_text(words), place, group))
    return calls


def _text(value: Any) -> str:
    # A reduction that names no operation is a sum: that is the default, and DDP's own.
    text = str(value).replace(" SUM ", " ")
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."


def _end_of(rank: RankRecord) -> str:
    if rank.finished:
        return "came to its end"
    if rank.evidence.get("killed by the kit"):
        return "waited until the kit ended it"
    if rank.exit is not None and rank.exit < 0:
        return f"died of signal {-rank.exit}"
    return f"ended with exit code {rank.exit}"
