"""What a rank saw, on disk: JSON lines as they happen, tensors when the run is over.

A record is plain data. The controller reads it with ``json`` and ``safetensors`` alone, checks that
it is complete, and never unpickles: nothing that a subject wrote is executed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from conformance.records.files import DONE, EVENTS, TENSORS


@dataclass
class RankRecord:
    """One rank's record as the controller reads it.

    Attributes:
        rank: global rank.
        events: every event in order.
        tensors: by name; empty when the rank did not reach its end.
        exit: exit status of the process; negative for a signal.
        evidence: captured output, stacks and flight recorder, as the host saw them.
    """

    rank: int
    events: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    exit: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    def all(self, name: str, /, **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of that name whose fields have those values."""
        for event in self.events:
            if event["event"] == name and fields.items() <= event.items():
                yield event

    def first(self, name: str, /, **fields: Any) -> dict[str, Any] | None:
        return next(self.all(name, **fields), None)

    @property
    def finished(self) -> bool:
        """Whether the rank wrote its whole record and then ended as the kit ends it."""
        end = self.first("end")
        return self.exit == DONE and end is not None and end["tensors"] == len(self.tensors)


def read_rank(folder: Path, rank: int, outcome: dict[str, Any]) -> RankRecord:
    """Read one rank's record, whatever state it was left in."""
    record = RankRecord(rank, exit=outcome.get("exit"), evidence=outcome)
    ahead = outcome.get("clock", 0.0)  # of another machine's clock
    try:
        with open(folder / EVENTS, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the rank died in the middle of a line
                if isinstance(event, dict) and {"event", "step", "time"} <= event.keys():
                    record.events.append({**event, "time": event["time"] - ahead} if ahead and isinstance(event["time"], float) else event)
    except FileNotFoundError:
        return record
    try:
        record.tensors = load_file(folder / TENSORS)
    except FileNotFoundError:
        pass
    except (SafetensorError, OSError) as error:
        record.evidence["unreadable"] = str(error)
    return record
