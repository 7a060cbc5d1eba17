"""Ranks for the benchmarks: processes with one thread each, on Gloo.

Rank 0 returns the result of a measurement.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

# Before torch reads them: ranks talk over the loopback device, and use one thread each.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def measure(target: Callable[..., None], world: int, *arguments: Any) -> Any:
    """Run ``target(rank, folder, *arguments, results)`` on several ranks.

    Returns:
        The value that rank 0 has put into the queue ``results``.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=target, args=(rank, folder, *arguments, results))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{arguments[0]}: a rank failed")
    return results.get()


def join(rank: int, world: int, folder: str) -> None:
    """Join the process group, with one thread."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )


def leave() -> None:
    """End the process after its result was put into the queue."""
    dist.barrier()
    # Threads of Gloo may still run. They would abort an ordinary end of the interpreter.
    os._exit(0)
