"""The processor and the memory of a simulated node. Runs in ranks only.

The nodes of a cluster are not alike. A choice by cores or memory that ranks make alone is then
another one on each node. Functions of Python's module ``os`` are replaced, and those with which
torch tells its threads and the processor's instructions; the files in ``/proc``, and programs in
other languages, have the real numbers.
"""

import os
import random
from collections.abc import Sequence
from typing import Any

import torch

from conformance.ranks.torchrun import torchrun_environment

_CORES = (1, 256)
_PAGES = (2**18, 2**29)  # 1 GiB to 2 TiB of 4 KiB
_CAPABILITIES = ("AVX512", "AVX2", "DEFAULT")
_NAMES_OF_CORES = ("SC_NPROCESSORS_ONLN", "SC_NPROCESSORS_CONF")
_NAMES_OF_PAGES = ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
# The kit records the affinity of threads as a setting, and must see each change.
real_affinity = os.sched_getaffinity


def hardware_of(node: int, nodes: int, seed: str) -> tuple[int, int]:
    """Return the numbers of cores and of pages of memory of a node.

    The range of their logarithms has a part for each node, so that some threshold anywhere in the
    range is likely to lie between two nodes. Which node has which part is drawn.
    """
    numbers = random.Random(f"{seed}/hardware")
    drawn = []
    for least, most in (_CORES, _PAGES):
        parts = [(part + numbers.random()) / nodes for part in range(nodes)]
        numbers.shuffle(parts)
        drawn.append(round(least * (most / least) ** parts[node]))
    return drawn[0], drawn[1]


def simulate_hardware(sizes: Sequence[int], rank: int, seed: str) -> None:
    """Let this process see the cores and the memory of its node, if the scenario has several.

    Args:
        sizes: the number of ranks on each node.
        rank: the global rank.
        seed: another one for each scenario of a session.
    """
    if len(sizes) > 1:
        node = int(torchrun_environment(sizes, rank)["GROUP_RANK"])
        give_hardware(*hardware_of(node, len(sizes), seed), node)


def give_hardware(cores: int, pages: int, node: int = 0) -> None:
    """Let this process see as many cores, as much memory, and the instructions of a node."""
    real_sysconf = os.sysconf

    def sysconf(name: Any) -> int:
        known = {os.sysconf_names[one]: one for one in (*_NAMES_OF_CORES, *_NAMES_OF_PAGES)}
        one = known.get(name, name)
        if one in _NAMES_OF_CORES:
            return cores
        if one in _NAMES_OF_PAGES:
            return pages if one == "SC_PHYS_PAGES" else pages // 2
        return real_sysconf(name)

    def sched_getaffinity(pid: int) -> set[int]:
        return set(range(cores)) if pid in (0, os.getpid()) else real_affinity(pid)

    replaced: Any = os
    replaced.cpu_count = lambda: cores
    replaced.sysconf = sysconf
    replaced.sched_getaffinity = sched_getaffinity
    if hasattr(os, "process_cpu_count"):
        replaced.process_cpu_count = lambda: cores
    _give_threads(cores)
    capability = _CAPABILITIES[node % len(_CAPABILITIES)]
    torch.backends.cpu.get_cpu_capability = lambda: capability


def _give_threads(cores: int) -> None:
    """Let torch tell a number of threads that suits the cores, until somebody sets another one.

    It computes with the real number, so that results have the same bits on all nodes.
    """
    torch_functions: Any = torch
    for name in ("get_num_threads", "get_num_interop_threads"):
        real = getattr(torch, name)
        at_first = real()

        def told(real: Any = real, at_first: int = at_first) -> int:
            number: int = real()
            return cores if number == at_first else number

        setattr(torch_functions, name, told)
