"""Simulated nodes have other numbers of cores, and other sizes of memory."""

import multiprocessing
import os

import pytest
import torch

from conformance.ranks.hardware import hardware_of, simulate_hardware
from conformance.ranks.instruments.process_settings import settings


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu_count", "sysconf", "sched_getaffinity", "process_cpu_count"):
        if hasattr(os, name):
            monkeypatch.setattr(os, name, getattr(os, name))
    for name in ("get_num_threads", "get_num_interop_threads"):
        monkeypatch.setattr(torch, name, getattr(torch, name))
    capability = torch.backends.cpu.get_cpu_capability
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", capability)


def test_a_single_node_is_the_real_one() -> None:
    before = os.cpu_count(), os.sysconf("SC_PHYS_PAGES")
    simulate_hardware((3,), 0, "seed")
    assert (os.cpu_count(), os.sysconf("SC_PHYS_PAGES")) == before


def test_a_node_has_cores_and_memory_of_its_own() -> None:
    threads = settings()["scheduling of threads"]
    page = os.sysconf("SC_PAGE_SIZE")
    simulate_hardware((2, 1), 2, "seed")
    cores, pages = hardware_of(1, 2, "seed")
    assert os.cpu_count() == multiprocessing.cpu_count() == cores
    assert len(os.sched_getaffinity(0)) == cores
    assert os.sysconf("SC_NPROCESSORS_ONLN") == cores
    assert os.sysconf(os.sysconf_names["SC_PHYS_PAGES"]) == pages
    assert os.sysconf("SC_AVPHYS_PAGES") == pages // 2
    assert os.sysconf("SC_PAGE_SIZE") == page
    assert torch.get_num_threads() == torch.get_num_interop_threads() == cores
    # Settings are those of the threads.
    assert settings()["scheduling of threads"] == threads


def test_nodes_have_other_instructions_and_threads_that_can_be_set() -> None:
    real = torch.get_num_threads()
    simulate_hardware((1, 1), 0, "seed")
    first = torch.backends.cpu.get_cpu_capability()
    simulate_hardware((1, 1), 1, "seed")
    assert torch.backends.cpu.get_cpu_capability() != first
    torch.set_num_threads(real + 1)
    try:
        assert torch.get_num_threads() == real + 1
    finally:
        torch.set_num_threads(real)


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_a_threshold_lies_between_two_nodes(nodes: int) -> None:
    parted = 0
    for seed in range(100):
        drawn = [hardware_of(node, nodes, str(seed)) for node in range(nodes)]
        assert all(1 <= cores <= 256 and 2**18 <= pages <= 2**29 for cores, pages in drawn)
        cores = [one for one, _ in drawn]
        parted += min(cores) < 16 <= max(cores)
    # One half of the range is below 16, so that the lowest and the highest part hold both sides.
    assert parted > 95
