"""Memory that ranks have not written."""

import subprocess
import sys

import pytest

from conformance.ranks import new_memory

_PRINTS = """
import torch
from conformance.ranks.new_memory import fill_new_memory
for rank in (0, 1):
    fill_new_memory(rank)
    for dtype in (torch.float32, torch.float16, torch.float64, torch.int64):
        print(torch.empty(5000, dtype=dtype)[-1].item())
"""


def test_new_memory_is_neither_zero_nor_left_from_before() -> None:
    # In a process of its own, because it stays like that.
    run = subprocess.run(
        [sys.executable, "-c", _PRINTS], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [
        *("nan", "nan", "nan", "-1"),
        *("3.3961513649220713e+38", "nan", "1.3824172084878715e+306", "9187201950435737471"),
    ]


def test_another_c_library_leaves_memory_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_memory.ctypes, "CDLL", lambda name: object())
    new_memory.fill_new_memory(0)
