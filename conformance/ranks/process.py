"""What makes a forked process fit to hold a stranger's code, and gives evidence of it when the host asks. Runs in ranks only."""

import faulthandler
import importlib.util
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

import torch


def prepare_process(own: Path, cwd: str) -> None:
    """Make this process a rank's: own temporary folder, stacks on demand, evidence thread.

    Args:
        own: the rank's folder.
        cwd: the caller's current directory, where Python looks for the subject first; this process's too, wherever its host began.
    """
    temporary = own / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None  # read TMPDIR again
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts in the background with it ignored
    os.chdir(cwd)
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    forget_other_references()
    stacks = open(own / "stacks.txt", "w")  # noqa: SIM115 - stays open until the process ends
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    os.mkfifo(own / "ask")
    threading.Thread(target=_give_evidence, args=(own,), name="conformance-evidence", daemon=True).start()


def scatter_heap(rank: int) -> None:
    """Have small objects of a rank lie in another order than those of its peers, as if it had not been forked from where they were.

    So that an order of addresses shows, such as that of a set of parameters: on a cluster no two ranks have the same.
    """
    order = random.Random(rank).sample(range(_BLOCKS), _BLOCKS)
    for size in range(48, 144, 16):  # of a parameter: 80 bytes
        made = [bytes(size - _BYTES) for _ in order]
        blocks = [made[place] for place in order]
        _kept.append(blocks.pop())  # the pool of blocks would begin anew if all of it were free
        made.clear()
        while blocks:
            blocks.pop()  # what is freed last is used first


_BYTES, _BLOCKS = sys.getsizeof(b""), 256
_kept: list[bytes] = []


def _give_evidence(own: Path) -> None:
    """Write the flight recorder's last collectives when the host opens the fifo: it does so before it kills."""
    with open(own / "ask") as ask:
        ask.read()
    trace: str | bytes = b""
    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # a backend has one or the other, and torch both where it has NCCL
        try:
            trace = getattr(torch._C._distributed_c10d, dump)(True, False)
        except (AttributeError, RuntimeError) as error:
            trace = trace or f"no flight recorder: {error}"
        if "entries" in str(trace):
            break
    (own / "flight.json").write_text(trace if isinstance(trace, str) else trace.decode())


def forget_other_references() -> None:
    """In a rank: forget the references that the host has imported, where the caller's path leads to others."""
    found = importlib.machinery.PathFinder.find_spec("hooks_ref")
    if found and found.origin != sys.modules["hooks_ref"].__file__:
        for name in [name for name in sys.modules if name.partition(".")[0] == "hooks_ref"]:
            del sys.modules[name]
