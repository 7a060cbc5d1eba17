"""Right hooks that keep something from their first use on: workers, groups, caches, files, logs.

None makes more of it with every step.
"""

import atexit
import logging
import queue
import tempfile
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import Bucket, Group, Result, dense


class Pool:
    """A state with an executor, whose workers start when they are needed."""

    def __init__(self, process_group: Any) -> None:
        self.group = process_group
        self.executor = ThreadPoolExecutor(max_workers=4)

    def submit(self, bucket: Bucket) -> Result:
        """Divide on a worker, and then sum."""
        buffer = bucket.buffer()
        # DDP's next bucket is summed after this one only if this call issues the sum itself.
        self.executor.submit(buffer.div_, self.group.size()).result()
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def with_executor(state: Pool, bucket: Bucket) -> Result:
    """Divide in an executor."""
    return state.submit(bucket)


class Worker:
    """A state with a daemon thread that starts with the first bucket and serves all others."""

    def __init__(self, process_group: Any) -> None:
        self.group = process_group
        self.jobs: queue.Queue[Any] | None = None

    def divide(self, buffer: torch.Tensor) -> None:
        if self.jobs is None:
            self.jobs = queue.Queue()
            threading.Thread(target=self._serve, args=(self.jobs,), daemon=True).start()
        done = threading.Event()
        self.jobs.put((buffer, done))
        done.wait()

    def _serve(self, jobs: Any) -> None:
        while True:
            buffer, done = jobs.get()
            buffer.div_(self.group.size())
            done.set()


def with_worker(state: Worker, bucket: Bucket) -> Result:
    """Divide on a thread of the state's own."""
    buffer = bucket.buffer()
    state.divide(buffer)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Cache:
    """A state with scratch buffers by size, a log in a file, and a group made at first use."""

    def __init__(self, process_group: Any) -> None:
        self.parent = process_group
        self.own: Any = None
        self.scratch: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.log: Any = None
        self.norms: deque[float] = deque(maxlen=100)

    def group(self) -> Any:
        if self.own is None:
            ranks = dist.get_process_group_ranks(self.parent)
            self.own = dist.new_group(ranks, use_local_synchronization=True)
            self.log = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the state
            atexit.register(self.log.flush)
            logging.getLogger(__name__).addHandler(logging.NullHandler())
        return self.own

    def scratch_for(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return memory of the size of a bucket, which is made when it is first needed."""
        key = (buffer.numel(), buffer.dtype)
        if key not in self.scratch:
            self.scratch[key] = torch.empty_like(buffer)
        return self.scratch[key]


def with_cache(state: Cache, bucket: Bucket) -> Result:
    """Average over a group of its own, with statistics, a log and scratch memory."""
    buffer = bucket.buffer()
    group = state.group()
    state.norms.append(float(buffer.numel()))
    state.log.write(b"x")
    # The scratch memory is free again when this call returns.
    scratch = state.scratch_for(buffer)
    torch.div(buffer, group.size(), out=scratch)
    buffer.copy_(scratch)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def restores_settings(state: Any, bucket: Bucket) -> Result:
    """Change settings for the length of a call, and restore them."""
    group = state if state is not None else dist.group.WORLD
    grad = torch.is_grad_enabled()
    with torch.random.fork_rng(), torch.autograd.grad_mode.set_grad_enabled(not grad):
        torch.manual_seed(0)
        torch.rand(1)
    buffer = bucket.buffer().div_(group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _state(name: str) -> str:
    return f"{__name__}:{name}"


class Wires:
    """Buffers in single precision, for sums of half precision; each is used again."""

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        self.free: list[torch.Tensor] = []
        self.lock = threading.Lock()

    def take(self, numel: int) -> torch.Tensor:
        with self.lock:
            for place, wire in enumerate(self.free):
                if wire.numel() == numel:
                    return self.free.pop(place)
        return torch.empty(numel)

    def give_back(self, wire: torch.Tensor) -> None:
        with self.lock:
            self.free.append(wire)


def sums_in_single_precision(state: Wires, bucket: Bucket) -> Result:
    """Sum half precision in float32, in a pool of buffers."""
    buffer = dense(bucket)
    if buffer.dtype not in (torch.float16, torch.bfloat16):
        wire = buffer
    else:
        wire = state.take(buffer.numel()).copy_(buffer)
    work = dist.all_reduce(wire.div_(state.group.size()), group=state.group, async_op=True)

    def back(future: Result) -> torch.Tensor:
        future.value()
        if wire is not buffer:
            buffer.copy_(wire)
            state.give_back(wire)
        return buffer

    return work.get_future().then(back)


_SECTIONS = ("1", "2", "4", "9")

RIGHT = [
    Right("with_executor", state=_state("Pool"), sections=_SECTIONS),
    Right("with_worker", state=_state("Worker"), sections=_SECTIONS),
    Right("with_cache", state=_state("Cache"), sections=_SECTIONS),
    Right("restores_settings", sections=_SECTIONS),
    Right("sums_in_single_precision", state=_state("Wires"), sections=_SECTIONS),
]
