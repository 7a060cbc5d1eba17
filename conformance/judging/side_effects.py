"""Side effects that a subject leaves in its process: requirements for every kind.

Hooks have a rule of section 9 for each sort of side effect. Other kinds have one rule each, which
requires all of them (:func:`require_no_side_effects`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from conformance.judging.oracles.growth import growing_counts, judges_counts
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.subjects.claims import Claims

# An import, or a set-up, may add filters, variables, paths and a log: these settings are compared
# from then on, all others from the start. Settings that torch or Python document as process wide,
# and that change what other code computes, are not among them.
SET_BY_IMPORTS = (
    "warnings filters",
    "environment",
    "sys.path",
    "finders of imports",
    "root logger",
)
# The states of a run after which the settings of SET_BY_IMPORTS are compared, the later ones first.
_LONG = 80  # characters of a value of which only the changed words are shown
_IMPORTED = ("registered", "imported", "start")


@dataclass(frozen=True)
class Change:
    """A setting that is not as it was.

    Attributes:
        name: of the setting, and of its part if it has several.
        before, after: its values.
    """

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        if max(len(self.before), len(self.after)) < _LONG:
            return f"{self.name}: {self.before} before, {self.after} now"
        parts = [f"{self.name} changed"]
        if added := _words_of_one(self.after, self.before):
            parts.append(f"added: {added}")
        if removed := _words_of_one(self.before, self.after):
            parts.append(f"removed: {removed}")
        return "; ".join(parts)


def changed_settings(rank: RankRecord) -> tuple[int, list[Change]]:
    """Return the number of settings that were compared, and those that changed."""
    start = rank.first("state", at="start")
    end = rank.first("state", at="end")
    if start is None or end is None:
        return 0, []
    states = [rank.first("state", at=at) for at in _IMPORTED]
    imported = next(state for state in states if state is not None)
    compared = 0
    changes = []
    for name, before in start["process"].items():
        if name in SET_BY_IMPORTS:
            before = imported["process"].get(name, before)
        # A setting that is recorded only once has no value to compare with.
        for part, was, now in _pairs(name, before, end["process"].get(name, before)):
            compared += 1
            if was != now:
                changes.append(Change(part, was, now))
    return compared, changes


def _pairs(name: str, before: Any, after: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each part of a setting, and its values; most settings have one part."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        yield name, str(before), str(after)
        return
    for key in before.keys() & after.keys():
        yield f"{name}: {key}", str(before[key]), str(after[key])


def _words_of_one(value: str, other: str) -> str:
    """Return the words of a long value that another one does not have."""
    words = {word.strip("()[]{},'\"") for word in set(value.split()) - set(other.split())}
    # Addresses of objects do not help people.
    kept = sorted(word for word in words if word and not word.startswith("0x"))
    return " ".join(kept)[:200]


def require_nothing_left(run: Run, claims: Claims, found: Found) -> None:
    """Require that no thread, process or file is left, and that none is made step by step.

    After a failure that the kit has caused, a subject may wait for a peer that is gone: such runs
    are not judged, and neither are simulated ranks, which are not closed.
    """
    if run.scenario.fault.kind != "none" or run.scenario.simulated:
        return
    for rank in run.ranks:
        name = f"rank {rank.rank}"
        start = rank.first("state", at="start")
        end = rank.first("state", at="end")
        if start is None or end is None:
            continue
        threads = [thread for thread in end["threads"] if thread not in start["threads"]]
        others = first_of(thread for thread in threads if not thread.endswith("(daemon)"))
        found.require(not others, "no threads left", f"{name}: threads left: {others}")
        children = first_of(end["children"])
        found.require(not children, "no processes left", f"{name}: {children}")
        files = first_of(end["files"])
        found.require(not files, "no files left", f"{name}: {files}")
        if judges_counts(rank, claims):
            found.checked(1)
            for growth in growing_counts(run, rank, claims):
                found.require(False, "as much after each step as before it", f"{name}: {growth}")
    survivors = first_of(run.left_processes)
    found.require(not survivors, "no processes left", f"outlived their rank: {survivors}")


def require_no_side_effects(run: Run, claims: Claims, found: Found) -> None:
    """Require that the process of every rank ends as it started.

    It compares random generators, settings, functions, threads, child processes, files, and the
    resources that grow with the steps. If the kit lets a collective fail, processes end there, and
    have no state at their end: such runs are not judged.
    """
    if run.scenario.fault.kind != "none":
        return
    for rank in run.ranks:
        name = f"rank {rank.rank}"
        start = rank.first("state", at="start")
        end = rank.first("state", at="end")
        if start is None or end is None:
            found.require(
                False, "a record of the process at its start and at its end", f"{name}: none"
            )
            continue
        found.checked(1)
        # Generators are compared around each call: the training script uses them, too.
        for event in rank.all("leaves"):
            changed = ", ".join(event["rng_changed"])
            actual = f"{name}, step {event['step']}: {event['what']} changed {changed}"
            found.require(not changed, "unchanged random generators", actual)
        for change in changed_settings(rank)[1]:
            found.require(False, "unchanged settings", f"{name}: {change}")
        replaced = first_of(end["patches"])
        found.require(not replaced, "unchanged functions", f"{name}: {replaced} replaced")
    require_nothing_left(run, claims, found)


def first_of(names: Iterable[Any], count: int = 5) -> str:
    """Return the first of some names, as one line."""
    return ", ".join(map(str, list(names)[:count]))
