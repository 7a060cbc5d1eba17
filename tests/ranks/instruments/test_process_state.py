"""The readings of the process: counts, settings and replaced functions."""

import functools
import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from conformance.ranks.instruments.digest import checksum, sampled_checksum
from conformance.ranks.instruments.patches import Patches
from conformance.ranks.instruments.process_settings import settings
from conformance.ranks.instruments.process_state import counts


def differences(change: Callable[[], object], back: Callable[[], object]) -> set[str]:
    """Return the names of the settings that a change changes."""
    before = settings()
    change()
    try:
        after = settings()
    finally:
        back()
    return {name for name, value in after.items() if value != before[name]}


def test_two_readings_are_equal() -> None:
    assert differences(lambda: None, lambda: None) == set()


@pytest.mark.parametrize(
    ("change", "back", "name"),
    [
        (gc.disable, gc.enable, "garbage collector"),
        (
            # Not the alarm, which the suite itself may use.
            lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000),
            lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 0),
            "timers",
        ),
        (lambda: logging.disable(50), lambda: logging.disable(0), "logging.disable"),
        (lambda: os.umask(0o077), lambda: os.umask(0o022), "status of the process"),
        (
            lambda: setattr(torch.backends.cudnn, "benchmark", True),
            lambda: setattr(torch.backends.cudnn, "benchmark", False),
            "flags of torch.backends",
        ),
    ],
)
def test_a_changed_setting_shows(
    change: Callable[[], object], back: Callable[[], object], name: str
) -> None:
    umask = os.umask(0o022)
    try:
        assert differences(change, back) == {name}
    finally:
        os.umask(umask)


def in_a_fork(function: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Return what the function returns in a fork, where no thread of an earlier test may end."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function)


def growth(before: dict[str, int]) -> dict[str, int]:
    """Return by how much the counts have risen."""
    return {name: count - before[name] for name, count in counts().items()}


def with_a_descriptor_and_a_thread() -> dict[str, int]:
    before = counts()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        return growth(before)
    finally:
        os.close(descriptor)
        end.set()
        thread.join()


def with_an_executor() -> dict[str, int]:
    before = counts()
    ready = threading.Barrier(4)
    with ThreadPoolExecutor(3) as executor:
        for _ in range(3):
            executor.submit(ready.wait)
        ready.wait()
        return growth(before)


# Python 3.12 warns of forks while torch's threads run; the fork has its own thread alone.
_forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@_forks
def test_counts_rise_with_descriptors_and_threads() -> None:
    rise = in_a_fork(with_a_descriptor_and_a_thread)
    assert rise["descriptors"] == 1
    assert rise["tasks"] == 1


@_forks
def test_workers_of_an_executor_count_as_one() -> None:
    assert in_a_fork(with_an_executor)["tasks"] == 1


def test_replaced_functions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = Patches()
    assert patches.found() == []
    wrapped = functools.wraps(torch.equal)(lambda *args: True)
    monkeypatch.setattr(torch, "equal", wrapped)
    monkeypatch.setattr(torch.nn.Module, "state_dict", lambda module: {})
    monkeypatch.setattr(torch.Tensor, "allclose", lambda *args: True, raising=False)
    monkeypatch.setattr(torch.Tensor, "a_new_name", lambda *args: True, raising=False)
    found = patches.found()
    assert [name.partition(" ")[0] for name in found] == [
        "torch.equal",
        "torch.Tensor.allclose",
        "torch.nn.Module.state_dict",
    ]
    # functools.wraps copies the name of a module, which does not deceive.
    assert all(name.endswith(f"(now from {__name__})") for name in found)
    patches.renew()
    assert patches.found() == []


def test_torchs_own_wrappers_of_optimizers_are_none() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Do nothing."""

    patches = Patches()
    Own([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert patches.found() == []


@pytest.mark.parametrize("shape", [(7,), (300, 300), (20, 30, 40, 50)])
def test_checksums_show_a_change_of_the_whole(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    before = sampled_checksum(tensor)
    whole = checksum(tensor)
    assert sampled_checksum(tensor) == before
    tensor.mul_(0.5)
    assert sampled_checksum(tensor) != before
    assert checksum(tensor) != whole


def test_a_checksum_shows_a_change_of_one_element() -> None:
    tensor = torch.ones(100_003)
    before = checksum(tensor)
    tensor[77_777] = 2
    assert checksum(tensor) != before
