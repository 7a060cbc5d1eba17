"""Prints what grows while a history gets entries of a kind, in a process with few other objects."""

import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from conformance.ranks.instruments.kept import kept

_ENTRIES = 900
_COUNTED = ("tensors", "bytes", "objects", "entries")


@dataclass
class _Event:
    step: int
    seconds: float


class _OneList:
    """Every entry is one list."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def __call__(self, step: int) -> list[int]:
        self.values.append(step)
        return self.values


KINDS: dict[str, tuple[int | None, Callable[[int], Any]]] = {
    "objects": (1000, lambda step: _Event(step, 1.0)),
    "small dicts": (1000, lambda step: {"steps": [step], "norm": torch.ones(3)}),
    "one list": (1000, _OneList()),
    "tensors": (1000, lambda step: torch.ones(1000)),
    "long lists": (1000, lambda step: [step] * 100),
    "too long": (10**6, lambda step: _Event(step, 1.0)),
    "without bound": (None, lambda step: _Event(step, 1.0)),
}


def growing(kind: str) -> list[str]:
    """Return the names of the counts that grow by half of the number of entries, or more."""
    longest, entry = KINDS[kind]
    history: deque[Any] = deque(maxlen=longest)
    kept()
    before = kept()
    for step in range(_ENTRIES):
        history.append(entry(step))
    after = kept()
    return [name for name in _COUNTED if after[name] > before[name] + _ENTRIES // 2]


if __name__ == "__main__":
    json.dump({kind: growing(kind) for kind in KINDS}, sys.stdout)
