"""Whether the ranks of a group issue the same collectives in the same order, and the first that differs if not.

Each group is compared by itself: on different groups, ranks may come in any order. Groups of the same ranks are told apart by
the order in which they are first used.
"""

from typing import Any

from conformance.record import RankRecord
from conformance.run import Run

Group = tuple[tuple[int, ...], int]  # its ranks, and how many groups of the same ranks were used before it


def disagreement(run: Run) -> str:
    """Return the first collective in which ranks of a group differ, in words; '' where they agree.

    Of a run that broke, a rank that issues none where another does counts only if it has gone on.
    """
    issued = {rank.rank: _issued(rank) for rank in run.ranks}
    for group in dict.fromkeys(group for groups in issued.values() for group in groups):
        sequences = {rank: issued[rank].get(group, []) for rank in group[0] if rank in issued}
        for number in range(max(map(len, sequences.values()))):
            at = {rank: events[number] if number < len(events) else None for rank, events in sequences.items()}
            said = {rank: _asked(event) for rank, event in at.items() if event}
            if len(set(said.values())) > 1:
                first, other = next(iter(said)), next(rank for rank, what in said.items() if what != next(iter(said.values())))
                return _sentence(run, group, number, first, at[first], other, at[other])
            first = next(iter(said))
            for rank in at.keys() - said.keys():
                if run.finished or _is_past(run.ranks[rank], at[first]):
                    return _sentence(run, group, number, first, at[first], rank, None)
    return ""


def _asked(event: dict[str, Any]) -> str:
    """Return what a collective does. An operation that is not named is a sum: that is the default, and DDP's own."""
    return str(event["what"]).replace(" SUM ", " ")


def _issued(rank: RankRecord) -> dict[Group, list[dict[str, Any]]]:
    """Return the collectives of a rank by group, in the order of their issue."""
    names: dict[tuple[int, ...], list[str]] = {}
    found: dict[Group, list[dict[str, Any]]] = {}
    for event in rank.all("collective"):
        ranks = tuple(event["group"])
        known = names.setdefault(ranks, [])
        if event["named"] not in known:
            known.append(event["named"])
        found.setdefault((ranks, known.index(event["named"])), []).append(event)
    return found


def _is_past(rank: RankRecord, event: dict[str, Any] | None) -> bool:
    """Whether a rank has returned from the call in which another issued a collective, and from the next if that was later."""
    return event is not None and any(returned["call"] >= event["call"] + (not event["inside"]) for returned in rank.all("returned"))


def _sentence(
    run: Run, group: Group, number: int, first: int, its: dict[str, Any] | None, other: int, others: dict[str, Any] | None
) -> str:
    ranks, nth = group
    among = f"ranks {', '.join(map(str, ranks))}" + (f" (the {nth + 1}. of theirs)" if nth else "")
    return (
        f"ranks disagree in collective {number + 1} of the group of {among}: "
        f"rank {first} issues {_in_words(run.ranks[first], its)}, rank {other} {_in_words(run.ranks[other], others)}"
    )


def _in_words(rank: RankRecord, event: dict[str, Any] | None) -> str:
    if event is None:
        return "none"
    call = rank.first("call", call=event["call"])
    where = f"step {event['step']}" + (f", bucket {call['index']}" if call else "")
    return f"{event['what']} ({where}{'' if event['inside'] else ', outside the hook'})"
