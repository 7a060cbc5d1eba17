"""Whether the ranks of a group issue the same collectives in the same order, and the first that differs if not.

Each group is compared by itself: on different groups, ranks may come in any order; whether they come in one is asked apart.
Groups of the same ranks are told apart by their names where ranks have the same for them, and else by the order in which they are
first used.
"""

import re
from itertools import combinations, zip_longest
from typing import Any

from conformance.records.rank_record import RankRecord
from conformance.records.run import Run

_BYTES = re.compile(r"\d+ uint8")
Group = tuple[tuple[int, ...], int]  # its ranks, and how many groups of the same ranks were used before it


def disagreement(run: Run) -> str:
    """Return the first collective in which ranks of a group differ, in words; '' where they agree.

    Of a run that broke, a rank that issues none where another does counts only if it has gone on.
    """
    issued = _issued(run)
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


def order_of_groups(run: Run) -> str:
    """Return the first place where two ranks use the groups that both are in in another order, in words; '' where there is none."""
    orders = _orders(run)
    for one, other in combinations(run.ranks, 2):
        both = [[(g, event) for g, event in orders[rank.rank] if {one.rank, other.rank} <= set(g[0])] for rank in (one, other)]
        for (group, event), (others_group, others_event) in zip(*both, strict=False):
            if group != others_group:
                return (
                    f"rank {one.rank} issues {_in_words(one, event)} on {_named(group)}, and rank {other.rank} "
                    f"{_in_words(other, others_event)} on {_named(others_group)} first"
                )
    return ""


def changed_order(run: Run, again: Run) -> str:
    """Return the first collective that a rank issues inside the hook in one of two runs and not in the other, in words; '' if none.

    Bytes are not counted: of pickled objects there are a few more or fewer each time.
    """
    for one, other in zip(run.ranks, again.ranks, strict=True):
        both = [[event for event in rank.all("collective") if event["inside"] and not event["callback"]] for rank in (one, other)]
        for number, (event, others_event) in enumerate(zip_longest(*both), 1):
            if event is None or others_event is None or len({_BYTES.sub("uint8", _asked(e)) for e in (event, others_event)}) > 1:
                return (
                    f"rank {one.rank} issues {_in_words(one, event)} as collective {number} in {run.name}, "
                    f"and in {again.name} {_in_words(other, others_event)}"
                )
    return ""


def _issued(run: Run) -> dict[int, dict[Group, list[dict[str, Any]]]]:
    """Return by rank and group the collectives in the order of their issue."""
    found: dict[int, dict[Group, list[dict[str, Any]]]] = {}
    for rank, order in _orders(run).items():
        found[rank] = {}
        for group, event in order:
            found[rank].setdefault(group, []).append(event)
    return found


def _orders(run: Run) -> dict[int, list[tuple[Group, dict[str, Any]]]]:
    """Return by rank the groups and collectives in the order of their issue."""
    names: dict[int, dict[tuple[int, ...], list[str]]] = {rank.rank: {} for rank in run.ranks}
    for rank in run.ranks:
        for event in rank.all("collective"):
            known = names[rank.rank].setdefault(tuple(event["group"]), [])
            if event["named"] not in known:
                known.append(event["named"])
    common: dict[tuple[int, ...], list[str]] = {}
    for ranks in {ranks for known in names.values() for ranks in known}:
        each = [names[rank][ranks] for rank in ranks if ranks in names.get(rank, {})]
        if all(set(known) == set(each[0]) for known in each):
            common[ranks] = each[0]
    return {
        rank.rank: [
            ((ranks, common.get(ranks, names[rank.rank][ranks]).index(event["named"])), event)
            for event in rank.all("collective")
            for ranks in [tuple(event["group"])]
        ]
        for rank in run.ranks
    }


def _is_past(rank: RankRecord, event: dict[str, Any] | None) -> bool:
    """Whether a rank has returned from the call in which another issued a collective, and from the next if that was later."""
    return event is not None and any(returned["call"] >= event["call"] + (not event["inside"]) for returned in rank.all("returned"))


def _sentence(
    run: Run, group: Group, number: int, first: int, its: dict[str, Any] | None, other: int, others: dict[str, Any] | None
) -> str:
    return (
        f"ranks disagree in collective {number + 1} of {_named(group)}: "
        f"rank {first} issues {_in_words(run.ranks[first], its)}, rank {other} {_in_words(run.ranks[other], others)}"
    )


def _named(group: Group) -> str:
    ranks, nth = group
    return f"the group of ranks {', '.join(map(str, ranks))}" + (f" (the {nth + 1}. of theirs)" if nth else "")


def _in_words(rank: RankRecord, event: dict[str, Any] | None) -> str:
    if event is None:
        return "none"
    call = rank.first("call", call=event["call"])
    where = f"step {event['step']}" + (f", bucket {call['index']}" if call else "")
    return f"{event['what']} ({where}{'' if event['inside'] else ', outside the hook'})"
