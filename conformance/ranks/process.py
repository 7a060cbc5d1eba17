"""Prepares a forked process to hold unknown code, and gives evidence of it. Runs in ranks only."""

import faulthandler
import importlib.machinery
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

import torch

from conformance.ranks.instruments.forgotten_modules import forget_package
from conformance.torch_versions.private import flight_record


def prepare_process(own: Path, cwd: str) -> None:
    """Give this process a temporary folder, stack dumps on a signal, and an evidence thread.

    Args:
        own: the rank's folder.
        cwd: the caller's current directory, where Python looks for the subject first. It becomes
            this process's directory too, whatever the directory of its host is.
    """
    temporary = own / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None  # read TMPDIR again
    torch.set_num_threads(1)  # ranks share the machine's cores
    # A shell starts background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    forget_other_references()
    stacks = open(own / "stacks.txt", "w")  # noqa: SIM115 - stays open until the process ends
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    os.mkfifo(own / "ask")
    evidence = threading.Thread(
        target=_give_evidence, args=(own,), name="conformance-evidence", daemon=True
    )
    evidence.start()


def scatter_heap(rank: int) -> None:
    """Free small blocks in an order drawn from the rank, so that new objects lie in that order.

    Ranks that are forked from one host would otherwise place their objects alike. On a cluster no
    two ranks do, so that an order of addresses, such as the order of a set of parameters, differs.
    """
    order = random.Random(rank).sample(range(_BLOCKS), _BLOCKS)
    for size in range(48, 144, 16):  # a parameter takes 80 bytes
        made = [bytes(size - _BYTES) for _ in order]
        blocks = [made[index] for index in order]
        # The allocator would start a pool of blocks anew if all of it were free: keep one.
        _kept.append(blocks.pop())
        made.clear()
        while blocks:
            blocks.pop()  # the allocator hands out the block that was freed last


_BYTES = sys.getsizeof(b"")
_BLOCKS = 256
_kept: list[bytes] = []


def _give_evidence(own: Path) -> None:
    """Write the flight recorder's last collectives when the host opens the fifo."""
    # The host opens it before it kills a rank that hangs: this thread still runs then.
    with open(own / "ask") as ask:
        ask.read()
    trace = flight_record()
    (own / "flight.json").write_text(trace if isinstance(trace, str) else trace.decode())


def forget_other_references() -> None:
    """Forget the references that the host has imported if the caller's path leads to others."""
    found = importlib.machinery.PathFinder.find_spec("hooks_ref")
    if found and found.origin != sys.modules["hooks_ref"].__file__:
        forget_package("hooks_ref")
