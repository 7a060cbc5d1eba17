"""What a subject keeps: entries of a bounded history are no growth, what they share is."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.ranks.instruments.kept import kept


@dataclass
class _Event:
    step: int
    seconds: float


class _OneList:
    """Every entry is one list; it is made late, since older objects may be frozen."""

    def __call__(self, step: int) -> list[int]:
        if step == 0:
            self.values: list[int] = []
        self.values.append(step)
        return self.values


@pytest.mark.parametrize(
    ("longest", "entry", "grows"),
    [
        (1000, lambda step: _Event(step, 1.0), set()),
        (1000, lambda step: {"steps": [step], "norm": torch.ones(3)}, set()),
        (1000, _OneList(), {"entries"}),
        (1000, lambda step: torch.ones(1000), {"tensors", "bytes"}),
        (1000, lambda step: [step] * 100, {"objects", "entries"}),
        (10**6, lambda step: _Event(step, 1.0), {"objects", "entries"}),
        (None, lambda step: _Event(step, 1.0), {"objects", "entries"}),
    ],
    ids=[
        "objects",
        "small dicts",
        "one list",
        "tensors",
        "long lists",
        "too long",
        "without bound",
    ],
)
def test_entries_of_a_history(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    longest: int | None,
    entry: Callable[[int], Any],
    grows: set[str],
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    history: deque[Any] = deque(maxlen=longest)
    kept()
    before = kept()
    for step in range(900):
        history.append(entry(step))
    after = kept()
    assert {
        name
        for name in ("tensors", "bytes", "objects", "entries")
        if after[name] > before[name] + 499
    } == grows
