"""Resources that grow with the steps of a run: descriptors, threads, process groups and memory.

A right subject may make something once: at its first step, when DDP has rebuilt its buckets (so
that the second step is the first with the final ones), or when a code path is first taken. A
subject that makes something again and again is wrong, however seldom it does. Both are told apart
by the steps at which a count rises for good.

Counts. Let c[0] be the count before the first step, and c[i] after the i-th. A thread that is about
to end, or a file that is still open, raises a count for a while only. So the rule reads m[i] =
min(c[i], c[i+1], ..., c[n]), the part of c[i] that stays to the end; it never falls. Rises of m in
the warm-up, and in the two steps after it (the first with a lossy claim's own path, and the first
with final buckets), are not judged. Among the others one rise is allowed for each object that was
made before the first step, for a path that this object takes there first; one more is a defect. On
a device, a communicator may be opened for each peer when it is first sent to, which allows one rise
for each peer. Steps in which the kit has made another object of the subject's do not count: what
belongs to an object is made with it.

Memory. Its sizes go up and down, and are judged by their difference over a gap: from the largest of
the first third of the steps that are judged to the smallest of the last third. A state whose size
varies around a level is not larger in all of the last third than in all of the first but by chance
(of three and three steps, once in 20 runs), and a leak is always. The limits:

- tensors that Python can reach are counted to the byte. A subject may keep numbers for each of its
  parameters and steps, as statistics: 64 bytes for each parameter and step of the gap. A lossy
  claim may keep values that it has held back, which fill up, so that half of the model is allowed
  as well.
- the C library's memory holds the records and objects of Python's, too: 2 KiB for each parameter
  and step of the gap, which is the length of their records, and at least 128 KiB. Of a large bucket
  that is sent in chunks of 1 MiB, each chunk took 1.4 KiB in each step (measured: 39 chunks, 163 KB
  in three steps), until pools are filled. So 2 KiB for each MiB of the model and step are allowed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.subjects.claims import Claims

COUNTED = {
    "descriptors": "open descriptors",
    "tasks": "threads",
    "groups": "process groups",
    "children": "child processes",
    "exit handlers": "functions for atexit",
    "global hooks": "hooks on all modules or optimizers",
}
SETTLING = 2  # steps
_OF_STATISTICS = 64  # bytes
_OF_RECORDS = 2048
_LEAST_ALLOCATED = 128 * 1024
_MIB = 1 << 20


@dataclass(frozen=True)
class Growth:
    """A resource that grew.

    Attributes:
        name: of the resource, for people.
        steps: the steps at whose ends the amount was larger for good.
        before, after: the amounts before the first of these steps, and after the last.
    """

    name: str
    steps: list[int]
    before: int
    after: int

    def __str__(self) -> str:
        steps = ", ".join(map(str, self.steps[:6])) + (", ..." if len(self.steps) > 6 else "")
        return f"{self.name} grew from {self.before} to {self.after}, at steps {steps}"


def growing_counts(run: Run, rank: RankRecord, claims: Claims) -> Iterator[Growth]:
    """Yield the resources of a rank that grew again and again; see the module's docstring."""
    events = list(rank.all("counts"))
    made = {event["step"] for event in rank.all("made")}
    before = (event for event in rank.all("made") if event["step"] < 0)
    allowed = max(1, sum(event.get("objects", 0) for event in before))
    if run.scenario.profile.device != "cpu":
        allowed *= max(1, run.world - 1)
    first = 1 + claims.warmup + SETTLING
    for name, words in COUNTED.items():
        values = lasting([event[name] for event in events if name in event])
        rises = [
            place
            for place in range(first, len(values))
            if values[place] > values[place - 1] and events[place]["step"] not in made
        ]
        if len(rises) > allowed:
            steps = [events[place]["step"] for place in rises]
            yield Growth(words, steps, values[rises[0] - 1], values[-1])


def lasting(values: list[int]) -> list[int]:
    """Return for each value its lasting part: the smallest of this value and all later ones."""
    kept: list[int] = []
    for value in reversed(values):
        kept.append(min(value, kept[-1]) if kept else value)
    return kept[::-1]


def judges_counts(rank: RankRecord, claims: Claims) -> bool:
    """Whether a run has enough steps for a defect to show."""
    return len(list(rank.all("counts"))) >= 1 + claims.warmup + SETTLING + 2


@dataclass(frozen=True)
class MemoryGrowth:
    """The growth of one sort of memory over the gap.

    Attributes:
        name: ``tensors`` or ``allocated``.
        grown: bytes.
        limit: the bytes that are allowed.
        steps: the number of steps between the two readings.
    """

    name: str
    grown: int
    limit: int
    steps: int


def memory_growth(run: Run, rank: RankRecord, claims: Claims) -> Iterator[MemoryGrowth]:
    """Yield the growth of a rank's memory beside its limit; nothing if the run is too short."""
    events = list(rank.all("memory"))[claims.warmup + SETTLING :]
    third = len(events) // 3
    if third == 0:
        return
    gap = len(events) - 2 * third + 1
    parameters = len(run.scenario.params)
    calls = rank.all("call", step=events[0]["step"])
    model = sum(call["numel"] * _ITEMSIZE for call in calls)
    limits = {
        "tensors": _OF_STATISTICS * parameters * gap + (model // 2 if claims.lossy else 0),
        "allocated": max(_LEAST_ALLOCATED, _OF_RECORDS * (parameters + model // _MIB) * gap),
    }
    if claims.lossy:
        limits["allocated"] += model // 2
    for name, limit in limits.items():
        before = max(event[name] for event in events[:third])
        after = min(event[name] for event in events[-third:])
        yield MemoryGrowth(name, after - before, limit, gap)


# Bytes of an element of float32. What is kept for an element of half precision may be of float32.
_ITEMSIZE = 4
