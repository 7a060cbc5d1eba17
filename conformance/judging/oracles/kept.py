"""Judge whether a subject of any kind but hooks keeps more and more in a long run.

The records have counts of objects before 41 steps that are evenly spaced over the run
(``ranks/instruments/kept.py``). Let c[0], ..., c[40] be one of them. A rise is a place i with

    min(c[i], ..., c[40]) > max(c[0], ..., c[i - 1]):

from there on the count is always larger than ever before. An object that is made now and then, a
buffer that changes its size and a list that is emptied now and then have no rise, but for the last
place, which has no later ones. A cache, or a history of bounded length, has rises until it is full.
It has two thirds of the run for this; what a ``deque`` with a ``maxlen`` up to 4096 alone holds is
not counted. In the last third one rise is allowed: for an object that is
made late, or for the last place. Two are a defect. So is one, if the last two thirds have two to
four rises: something that comes slowly, where a cache that fills would come in more places.

    an object in every k-th of n steps           k <= n / 3 - n / 40, which is more than 3 n / 10
    from some step on, in every step             2 n / 40 steps before the end, or earlier

Memory of the C library holds objects that Python does not see. It also drifts by half a KiB a step
while the caches of its threads fill. It grows if it does so by 4 KiB for each step, in each
interval of the last third.
"""

from itertools import pairwise

from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run

_COUNTED = {
    "tensors": "tensors that are kept: in a list, a dict or a closure",
    "bytes": "tensors that grow",
    "nodes": "a graph of autograd that grows: a sum of losses, or a tensor that is not detached",
    "objects": "objects that are kept: closures, hooks, futures, handles, dicts",
    "entries": "a list, dict, set or deque that collects values, Work objects or hooks",
    "keys": "keys that are set in the store of a process group, and not deleted",
    "files": "files in the temporary directory that are never removed",
}
_SLOW = 4  # rises in two thirds of a run
_LARGEST_DRIFT = 4096  # bytes for each step


def require_nothing_kept(run: Run, found: Found) -> None:
    """Require that no rank keeps more and more; see the module's docstring."""
    for rank in run.ranks:
        events = list(rank.all("kept"))
        if len(events) < 12:
            found.lacks_evidence("the run is too short for growth to show")
            return
        found.checked(1)
        for name, cause in _COUNTED.items():
            # Records of earlier versions have no keys.
            values = [event.get(name, 0) for event in events]
            places = _rises(values)
            late = [place for place in places if place >= 2 * len(values) // 3]
            comes_slowly = bool(late) and 2 <= len(places) <= _SLOW
            if len(late) < 2 and not comes_slowly:
                continue
            steps = [events[place]["at"] for place in places]
            shown = ", ".join(map(str, steps[:6])) + (", ..." if len(steps) > 6 else "")
            grown = f"{name} grow from {values[places[0] - 1]} to {values[-1]}"
            found.require(
                False,
                "a subject that keeps no more after two thirds of the run",
                f"rank {rank.rank}: {grown}; they are more than ever before at steps {shown}",
                cause,
            )
        _require_steady_memory(rank, found)


def require_models_gone(run: Run, found: Found) -> None:
    """Require that models which have gone are not in memory, but for the last one."""
    for rank in run.ranks:
        for event in rank.all("models"):
            alive, made = event["alive"], event["made"]
            if event["threads"] >= alive > 1:
                # Without a call that ends the thread of an object, nothing can free the object.
                found.note("each averager has a thread, which keeps its model in memory")
                continue
            found.require(
                alive <= 1,
                "one model that is kept at most",
                f"rank {rank.rank}: {alive} of {made} models that have gone are still in memory",
                "a cache of a module or a class holds their parameters, as functools.lru_cache "
                "does: keep it in the object, or hold them weakly",
            )


def _rises(values: list[int]) -> list[int]:
    """Return the places after the first third at which a count is larger for good."""
    return [
        place
        for place in range(len(values) // 3, len(values))
        if min(values[place:]) > max(values[:place])
    ]


def _require_steady_memory(rank: RankRecord, found: Found) -> None:
    events = list(rank.all("kept"))
    last = events[2 * len(events) // 3 :]
    slopes = [
        (after["memory"] - before["memory"]) / (after["at"] - before["at"])
        for before, after in pairwise(last)
    ]
    found.require(
        min(slopes) < _LARGEST_DRIFT,
        "memory that does not grow in the last third of the run",
        f"rank {rank.rank}: it grows by {min(slopes):.0f} bytes a step and more, by "
        f"{last[-1]['memory'] - last[0]['memory']} bytes in all",
        "buffers or messages that are kept outside of Python",
    )
