"""Reads the record of one rank: its events, its tensors, and the evidence that the host collected.

A record is plain data. The controller reads it with ``json`` and ``safetensors`` alone, checks that
it is complete, and unpickles nothing: no code of the subject is executed.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from conformance.records.files import COVERAGE, DONE, EVENTS, TENSORS


class IncompleteRecord(Exception):
    """A rule reads a part of a record that is not there, although the rank came to its end.

    A subject can keep the kit from recording: it patches a function, swallows an exception, or
    changes the shape of a parameter. The rule then fails, with these sentences.

    Attributes:
        expected: the part of the record.
        actual: its state, and the rank.
    """

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__(f"{expected}: {actual}")
        self.expected = expected
        self.actual = actual


class Event(dict[str, Any]):
    """One event. A field that is not in it raises IncompleteRecord."""

    def __missing__(self, field: str) -> Any:
        raise IncompleteRecord(
            f"{field!r} of the event {self['event']!r} on record",
            f"it is missing in step {self['step']}",
        )


class Tensors(dict[str, torch.Tensor]):
    """The tensors of one rank by name. One that is not there raises IncompleteRecord."""

    def __init__(self, rank: int, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(tensors or {})
        self._rank = rank

    def __missing__(self, name: str) -> torch.Tensor:
        raise IncompleteRecord(f"{name} on record", f"rank {self._rank} has recorded none")


@dataclass
class RankRecord:
    """One rank's record, as the controller reads it.

    Attributes:
        rank: the global rank.
        events: all events in order.
        tensors: the tensors by name; empty if the rank did not reach its end.
        exit: the exit status of the process; negative for a signal.
        evidence: the output, the stacks and the flight recorder, as the host collected them.
        coverage: the marks of the subject's own files that ran (``source_marks.py``); None if the
            rank did not note them, or was killed.
    """

    rank: int
    events: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    exit: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    coverage: dict[str, Any] | None = None
    _by_name: dict[str, list[dict[str, Any]]] = field(default_factory=dict, init=False, repr=False)
    _sorted: int = field(default=0, init=False, repr=False)
    _last: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)

    def _named(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a name. Rules ask for them a hundred thousand times."""
        if self.events[self._sorted - 1 : self._sorted] != self._last:
            self._by_name, self._sorted = {}, 0  # tests insert events, and remove some
        for event in self.events[self._sorted :]:
            self._by_name.setdefault(event["event"], []).append(event)
        self._sorted = len(self.events)
        self._last = self.events[-1:]
        return self._by_name.get(name, [])

    def all(self, name: str, /, **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a name whose fields have the given values."""
        for event in self._named(name):
            if fields.items() <= event.items():
                yield event

    def first(self, name: str, /, **fields: Any) -> dict[str, Any] | None:
        """Return the first of these events, or None."""
        return next(self.all(name, **fields), None)

    def one(self, name: str, /, **fields: Any) -> dict[str, Any]:
        """Return the first of these events.

        Raises:
            IncompleteRecord: there is none.
        """
        found = self.first(name, **fields)
        if found is None:
            which = "".join(f", {key} {value}" for key, value in fields.items())
            raise IncompleteRecord(
                f"an event {name!r} on record{which}", f"rank {self.rank} has recorded none"
            )
        return found

    @property
    def finished(self) -> bool:
        """Whether the rank wrote its whole record and the kit then ended the process."""
        end = self.first("end")
        return self.exit == DONE and end is not None and end["tensors"] == len(self.tensors)


def read_rank(folder: Path, rank: int, outcome: dict[str, Any]) -> RankRecord:
    """Read one rank's record as far as it was written.

    Args:
        folder: the rank's folder.
        outcome: the rank's entry in the outcome of the run.
    """
    record = RankRecord(rank, exit=outcome.get("exit"), evidence=outcome)
    record.coverage = _read_coverage(folder / COVERAGE)
    # By how many seconds the clock of the rank's machine is ahead of the controller's.
    clock_offset = outcome.get("clock", 0.0)
    try:
        with open(folder / EVENTS, encoding="utf-8", errors="replace") as file:
            record.events.extend(_read_events(file.read(), clock_offset))
    except FileNotFoundError:
        return record
    try:
        record.tensors = Tensors(rank, load_file(folder / TENSORS))
    except FileNotFoundError:
        pass
    except (SafetensorError, OSError) as error:
        record.evidence["unreadable"] = str(error)
    return record


def _read_coverage(path: Path) -> dict[str, Any] | None:
    """Return the marks that ran, or None if there is no file of the form that the kit writes."""
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        files = {
            str(name): {
                "module": str(entry["module"]),
                "sha256": str(entry["sha256"]),
                "ran": [int(mark) for mark in entry["ran"]],
                "at_import": [int(mark) for mark in entry["at_import"]],
            }
            for name, entry in noted["files"].items()
        }
        return {"files": files, "home": str(noted["home"]), "reason": str(noted["reason"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_events(text: str, clock_offset: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, with times on the controller's clock."""
    for event in _read_lines(text.splitlines()):
        # A subject may have written to the file as well.
        if not isinstance(event, dict) or not {"event", "step", "time"} <= event.keys():
            continue
        if clock_offset and isinstance(event["time"], float):
            event["time"] -= clock_offset
        yield Event(event)


def _read_lines(lines: list[str]) -> list[Any]:
    """Return the values of lines of JSON, without lines that are none."""
    # All at once takes a third of the time.
    with contextlib.suppress(json.JSONDecodeError):
        values: list[Any] = json.loads(f"[{','.join(lines)}]")
        if len(values) == len(lines):
            return values
    found = []
    for line in lines:
        # The rank may have died while it wrote a line.
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
