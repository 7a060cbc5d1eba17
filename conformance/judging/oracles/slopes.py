"""Judge whether a process needs more and more: counts at places of a long run.

Counts are compared with counts, never with a clock. They are taken after the collection of garbage,
at places that are evenly spaced over the run, without the first four: caches, pools
and statistics have a third of the run to fill. A leak grows in each of the eight intervals that
follow. What fills up, or is needed now and then, does not.

    descriptors, tasks, groups, children, files, keys
            integers that nothing else changes. An interval of a run of 1,200 steps has 100 steps:
            one more in each interval is one in every 100 steps. It is a leak if it is one more in
            six of eight intervals, and never less: a leak at every 100th step, or more often, is
            found wherever intervals begin.
    blocks
            small objects of Python's, of which a step may hold some when they are counted. A leak
            adds at least one in every fourth step, in each interval.
    memory
            bytes that the C library has lent, with those that it keeps for itself: the caches of
            its threads drift by some bytes a step. A tensor takes at least 400 bytes, however
            small it is. A leak adds 64 bytes in each step of each interval: a tensor in every
            sixth step.
"""

from itertools import pairwise

from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord

WARM_UP = 4  # checkpoints that are left out: a third of the run
SMALLEST = {"blocks": 1 / 4, "memory": 64.0}  # for each step of an interval
FEWEST_GROWING = 6  # of eight intervals
_NAMES = {
    "descriptors": "open descriptors: files or sockets that are never closed",
    "tasks": "threads that never end",
    "groups": "process groups that are never destroyed",
    "children": "processes that are never reaped",
    "files": "files in the temporary directory that are never removed",
    "keys": "keys in the store of process groups that are never deleted: rank 0 keeps them",
    "blocks": "objects of Python's that are kept: a list, a dict, futures or Work objects",
    "memory": "memory that is kept: buffers, copies of gradients, tensors in a list or a closure",
}


def require_no_growth(rank: RankRecord, names: list[str], found: Found) -> None:
    """Require that no count of a rank grows with the steps.

    Args:
        rank: the rank's record, with its ``checkpoint`` events.
        names: the counts to judge.
        found: the findings of the rule.
    """
    events = list(rank.all("checkpoint"))[WARM_UP:]
    if len(events) < 3:
        return
    # Records of an earlier version lack the counts that are newer.
    known = [name for name in names if any(name in event for event in events)]
    for name in known:
        changes = [after[name] - before[name] for before, after in pairwise(events)]
        steps = [after["step"] - before["step"] for before, after in pairwise(events)]
        if name in SMALLEST:
            smallest = [SMALLEST[name] * count for count in steps]
            grows = all(more >= least for more, least in zip(changes, smallest, strict=True))
        else:
            growing = sum(more > 0 for more in changes)
            grows = min(changes) >= 0 and growing >= FEWEST_GROWING
        total = sum(changes)
        first = events[0]["step"]
        found.require(
            not grows,
            "a process that needs no more after a third of the run",
            f"rank {rank.rank}: {name} grow by {min(changes)} to {max(changes)} in each interval "
            f"of {steps[0]} steps, by {total} from step {first} to step {events[-1]['step']}",
            _NAMES[name],
        )
