"""What a rank saw, on disk: JSON lines as they happen, tensors when the run is over.

A record is plain data. The controller reads it with ``json`` and ``safetensors`` alone, checks that
it is complete, and never unpickles: nothing that a subject wrote is executed.
"""

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from conformance.run_folder import DONE, EVENTS, TENSORS


class Recorder:
    """Writes one rank's record. Each event is on disk before the next thing happens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = os.open(folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._tensors: dict[str, torch.Tensor] = {}
        self._clock = time.monotonic
        self.step = -1
        self.held = 0  # bytes in the tensors kept so far
        self.failure = ""  # why the disk took no more, which is never the subject's fault

    def event(self, name: str, /, **fields: Any) -> None:
        """Append one event, stamped with the current step."""
        line = json.dumps({"event": name, "step": self.step, "time": self._clock(), **fields}) + "\n"
        with self._lock, self._noting_a_full_disk():
            os.write(self._file, line.encode())

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a dense tensor under ``name``; complex ones as pairs of reals."""
        tensor = tensor.detach()
        tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # One on another device is read on the current stream, as a training script would read it; no other stream is waited for.
        self._tensors[name] = kept = tensor.contiguous().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.held += kept.numel() * kept.element_size()

    def close(self) -> None:
        """Write the tensors and the closing event, without which a record is incomplete."""
        with self._noting_a_full_disk():
            try:
                save_file(self._tensors, self._folder / TENSORS)
            except SafetensorError as error:  # safetensors has no errno
                raise OSError(errno.EIO, str(error)) from error
        self.event("end", tensors=len(self._tensors))

    @contextlib.contextmanager
    def _noting_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                self.failure = str(error)
            raise


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
