"""Ranks for the benchmarks: processes of one thread each on Gloo, of which the first has an answer."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def ask(target: Callable[..., None], world: int, *arguments: Any) -> float:
    """Run ``target(rank, folder, *arguments, answers)`` on ``world`` ranks and return the answer of rank 0."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=target, args=(rank, folder, *arguments, answers))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{arguments[0]}: a rank failed")
    return answers.get()


def join(rank: int, world: int, folder: str) -> None:
    """Make the process group."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )


def leave() -> None:
    """End the process, its answer given: threads of Gloo's that are running still would abort the interpreter's own end."""
    dist.barrier()
    os._exit(0)
