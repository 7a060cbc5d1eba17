"""Compare the collectives of ranks: whether all ranks of a group issue the same, in the same order.

Each group is compared by itself: on different groups, ranks may issue collectives in any order.
:func:`order_of_groups` judges that order separately.

Several groups may consist of the same ranks. Their names distinguish them if the ranks know them by
the same names; otherwise they are numbered in the order of their first use.

All three functions return a sentence on the first difference, and an empty text if there is none.
"""

import re
from collections import Counter
from itertools import combinations, zip_longest
from typing import Any

from conformance.records.rank_record import RankRecord
from conformance.records.run import Run

_BYTES = re.compile(r"\d+ uint8")

Event = dict[str, Any]

# The ranks of a group, and the number of groups of the same ranks that were used before it.
Group = tuple[tuple[int, ...], int]


def disagreement(run: Run) -> str | None:
    """Return a sentence on the first collective in which two ranks of a group differ, or None.

    In a failed run, a rank without a collective that another issued counts only if it has gone on.
    """
    issued = _by_rank_and_group(run)
    for group in dict.fromkeys(group for groups in issued.values() for group in groups):
        sequences = {rank: issued[rank].get(group, []) for rank in group[0] if rank in issued}
        for number in range(max(map(len, sequences.values()))):
            events = {rank: seq[number] for rank, seq in sequences.items() if number < len(seq)}
            first = next(iter(events))
            wanted = _content(events[first])
            for other, event in events.items():
                if _content(event) != wanted:
                    return _difference(run, group, number, (first, events[first]), (other, event))
            for other in sequences.keys() - events.keys():
                if run.finished or _is_past(run.ranks[other], events[first]):
                    return _difference(run, group, number, (first, events[first]), (other, None))
    return _uneven_step(run, issued) if run.scenario.long_run else None


def _uneven_step(run: Run, issued: dict[int, dict[Group, list[Event]]]) -> str | None:
    """Return a sentence on the first step in which ranks issue different numbers of collectives.

    A long run has the same collectives in every step, so that a missing one shows in no content.
    Only steps that every rank has left count.
    """
    last = min(max((event["step"] for event in rank.all("step")), default=0) for rank in run.ranks)
    for group in dict.fromkeys(group for groups in issued.values() for group in groups):
        members = [rank for rank in group[0] if rank in issued]
        counts = {
            rank: Counter(event["step"] for event in issued[rank].get(group, []))
            for rank in members
        }
        for step in range(last):
            numbers = [counts[rank][step] for rank in members]
            if len(set(numbers)) > 1:
                words = ", ".join(f"rank {r} {n}" for r, n in zip(members, numbers, strict=True))
                return f"in step {step} ranks issue different numbers of collectives: {words}"
    return None


def order_of_groups(run: Run) -> str | None:
    """Return a sentence on the first two groups that two of their ranks use in different orders.

    It is None if there are none.
    """
    orders = _with_groups(run)
    for one, other in combinations(run.ranks, 2):
        pair = {one.rank, other.rank}
        first = [(group, event) for group, event in orders[one.rank] if pair <= set(group[0])]
        second = [(group, event) for group, event in orders[other.rank] if pair <= set(group[0])]
        for (group, event), (others_group, others_event) in zip(first, second, strict=False):
            if group != others_group:
                its = f"{_describe(one, event)} on {_name(group)}"
                others = f"{_describe(other, others_event)} on {_name(others_group)}"
                return f"rank {one.rank} issues {its}, and rank {other.rank} {others} first"
    return None


def changed_order(run: Run, again: Run) -> str | None:
    """Return a sentence on the first collective in the hook that a rank issues in one run only.

    It is None if there is none.
    """
    for one, other in zip(run.ranks, again.ranks, strict=True):
        pairs = zip_longest(_inside_the_hook(one), _inside_the_hook(other))
        for number, (event, others_event) in enumerate(pairs, 1):
            if event is None or others_event is None or not _is_repeated(event, others_event):
                return (
                    f"collective {number} in the hook on rank {one.rank} is "
                    f"{_describe(one, event)} in {run.name}, and {_describe(other, others_event)} "
                    f"in {again.name}, with another PYTHONHASHSEED"
                )
    return None


def _inside_the_hook(rank: RankRecord) -> list[Event]:
    events = rank.all("collective")
    return [event for event in events if event["inside"] and not event["callback"]]


def _is_repeated(event: Event, other: Event) -> bool:
    # The size of a pickled object, sent as uint8, varies by a few bytes between processes.
    return _BYTES.sub("uint8", _content(event)) == _BYTES.sub("uint8", _content(other))


def _content(event: Event) -> str:
    """Return operation, size, dtype and root of a collective."""
    # A reduction that names no operation is a sum: that is the default, and DDP's own.
    return str(event["what"]).replace(" SUM ", " ")


def _by_rank_and_group(run: Run) -> dict[int, dict[Group, list[Event]]]:
    """Return the collectives by rank and group, in the order of their issue."""
    issued: dict[int, dict[Group, list[Event]]] = {}
    for rank, order in _with_groups(run).items():
        issued[rank] = {}
        for group, event in order:
            issued[rank].setdefault(group, []).append(event)
    return issued


def _with_groups(run: Run) -> dict[int, list[tuple[Group, Event]]]:
    """Return the collectives by rank with their groups, in the order of their issue."""
    names = {rank.rank: _names_of_groups(rank) for rank in run.ranks}
    common: dict[tuple[int, ...], list[str]] = {}
    for ranks in {ranks for known in names.values() for ranks in known}:
        each = [names[rank][ranks] for rank in ranks if ranks in names.get(rank, {})]
        if all(set(known) == set(each[0]) for known in each):
            common[ranks] = each[0]
    orders: dict[int, list[tuple[Group, Event]]] = {}
    for rank in run.ranks:
        orders[rank.rank] = []
        for event in rank.all("collective"):
            ranks = tuple(event["group"])
            known = common.get(ranks, names[rank.rank][ranks])
            orders[rank.rank].append(((ranks, known.index(event["named"])), event))
    return orders


def _names_of_groups(rank: RankRecord) -> dict[tuple[int, ...], list[str]]:
    """Return by ranks the names of the groups that a rank used, in the order of their first use."""
    names: dict[tuple[int, ...], list[str]] = {}
    for event in rank.all("collective"):
        known = names.setdefault(tuple(event["group"]), [])
        if event["named"] not in known:
            known.append(event["named"])
    return names


def _is_past(rank: RankRecord, event: Event) -> bool:
    """Return whether a rank has left the call in which another rank issued a collective."""
    # A collective that was issued outside the hook came after the call, and before the next one.
    call = event["call"] + (0 if event["inside"] else 1)
    return any(returned["call"] >= call for returned in rank.all("returned"))


def _difference(
    run: Run,
    group: Group,
    number: int,
    first: tuple[int, Event],
    other: tuple[int, Event | None],
) -> str:
    one_rank, event = first
    other_rank, others_event = other
    return (
        f"ranks disagree in collective {number + 1} of {_name(group)}: "
        f"rank {one_rank} issues {_describe(run.ranks[one_rank], event)}, "
        f"rank {other_rank} {_describe(run.ranks[other_rank], others_event)}"
    )


def _name(group: Group) -> str:
    ranks, before = group
    name = f"the group of ranks {', '.join(map(str, ranks))}"
    return f"{name} (number {before + 1} of these ranks)" if before else name


def _describe(rank: RankRecord, event: Event | None) -> str:
    """Return a collective and its place in words."""
    if event is None:
        return "none"
    place = f"step {event['step']}"
    call = rank.first("call", call=event["call"])
    if call:
        place += f", bucket {call['index']}"
    if not event["inside"]:
        place += ", outside the hook"
    return f"{event['what']} ({place})"
