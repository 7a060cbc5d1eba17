"""The state that all libraries of a process share, in a form that two readings can be compared.

``rng`` returns digests of the global random generators, which change with every number that is
drawn. ``counts`` returns the resources in use. Settings are read in ``process_settings.py``, and
replaced functions are found in ``patches.py``.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist

from conformance.ranks.instruments.digest import digest_of_bytes
from conformance.scenarios.profiles import CUDA
from conformance.torch_versions.private import global_hooks, known_groups

# Names of global generators in ``rng``.
TORCHS_GENERATORS = frozenset({"torch", CUDA})
CPU_GENERATORS = frozenset({"torch", "python", "numpy"})
# Linux: children that were cloned without a signal at their end, too.
_WALL = 0x40000000


def rng() -> dict[str, str]:
    """Return digests of the states of the global generators.

    They are torch's generator on the CPU, Python's, and, if they are in use, CUDA's and NumPy's.
    The state of CUDA's generator is kept on the host: to read it waits for no stream.
    """
    states = {
        "torch": bytes(torch.get_rng_state().numpy()),
        "python": str(hash(random.getstate())).encode(),
    }
    if torch.cuda.is_initialized():
        states[CUDA] = bytes(torch.cuda.get_rng_state().numpy())
    if numpy := sys.modules.get("numpy"):
        parts = numpy.random.get_state()
        states["numpy"] = b" ".join(
            str(part).encode() if isinstance(part, (str, int, float)) else part.tobytes()
            for part in parts
        )
    return {name: digest_of_bytes(state) for name, state in states.items()}


def left_behind() -> dict[str, Any]:
    """Return the threads, processes and files at the end of a run."""
    return {
        "threads": threads(),
        "children": children(),
        "files": files_left(),
    }


def counts() -> dict[str, int]:
    """Return how much of the process's resources is in use, in less than a tenth of a
    millisecond.

    A step that opens what it never closes makes one of these numbers grow:

    - ``descriptors``: open files, sockets and pipes;
    - ``tasks``: threads of any language. All workers of an executor count as one thread, since an
      executor starts workers when it needs them, up to a number that it knows;
    - ``groups``: process groups that torch.distributed has registered;
    - ``children``: processes that this one has started and not reaped;
    - ``exit handlers``: functions that ``atexit`` calls;
    - ``global hooks``: hooks on all modules or on all optimizers.
    """
    workers, executors = _workers_of_executors()
    tasks = os.listdir("/proc/self/task")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # one is the listing's own
        "tasks": len(tasks) - workers + executors,
        "groups": len(known_groups().pg_map) if dist.is_available() else 0,
        "children": len(_child_ids(tasks)),
        "exit handlers": atexit._ncallbacks(),
        "global hooks": sum(len(hooks) for hooks in global_hooks().values()),
    }


def _workers_of_executors() -> tuple[int, int]:
    """Return the number of live workers of executors, and the number of their executors."""
    executor = sys.modules.get("concurrent.futures.thread")
    queues = getattr(executor, "_threads_queues", {})
    alive = [queue for thread, queue in list(queues.items()) if thread.is_alive()]
    return len(alive), len(set(map(id, alive)))


def threads() -> list[str]:
    """Return the names of the Python threads, with ``(daemon)`` after those of daemons.

    Two kinds are left out: threads that C++ lent to a callback, and workers of an executor, which
    Python joins at exit.
    """
    executor = sys.modules.get("concurrent.futures.thread")
    workers = set(getattr(executor, "_threads_queues", ()))
    own = [thread for thread in threading.enumerate() if _is_python_thread(thread)]
    return sorted(_thread_name(thread) for thread in own if thread not in workers)


def let_threads_end(before: list[str], seconds: float = 1.0) -> None:
    """Give threads that are about to end the time to do so; all together, ``seconds`` at most."""
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if _thread_name(thread) not in before and _is_python_thread(thread):
            thread.join(max(0.0, end - time.monotonic()))


def _thread_name(thread: threading.Thread) -> str:
    return thread.name + (" (daemon)" if thread.daemon else "")


def _is_python_thread(thread: threading.Thread) -> bool:
    return not isinstance(thread, threading._DummyThread)


def children() -> list[str]:
    """Return the command lines of the processes that this one has started and not reaped."""
    return [_command_line(pid) for pid in _child_ids(os.listdir("/proc/self/task"))]


def _child_ids(tasks: Iterable[str]) -> list[str]:
    if not _has_children():
        return []
    found = []
    for task in tasks:
        # A thread may end between the listing and the reading; its children then pass to another.
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/self/task/{task}/children") as file,
        ):
            found += file.read().split()
    return found


def _has_children() -> bool:
    """Whether there are processes that this one has started and not reaped; in one call, while
    their numbers take one for each thread.
    """
    try:
        # WNOWAIT reaps none of them.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
    except ChildProcessError:
        return False
    return True


def files_left() -> list[str]:
    """Return the files in the rank's own temporary directory."""
    temporary = os.environ["TMPDIR"]
    return sorted(
        os.path.join(folder, name) for folder, _, names in os.walk(temporary) for name in names
    )


def live_memory() -> dict[str, int]:
    """Return the bytes in tensors that Python can reach, and in blocks of the C library.

    If CUDA is in use, the bytes that its caching allocator has lent out and reserved on the
    current device are added. The device is waited for first: until then memory that its streams
    use cannot be given back.
    """
    gc.collect()
    of_device = {}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        of_device = {
            CUDA: torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
    storages = {}
    for item in gc.get_objects():
        # isinstance() would read ``__class__``, which raises for a dead weakref.proxy.
        if not issubclass(type(item), torch.Tensor):
            continue
        if item.layout == torch.strided and item.device.type in ("cpu", "cuda"):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return {"tensors": sum(storages.values()), "allocated": allocated(), **of_device}


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    """Return glibc's function, or None for another C library."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    function.restype = _Mallinfo2
    return cast("Callable[[], _Mallinfo2]", function)


def allocated() -> int:
    """Return the bytes in use of glibc's allocator; 0 for another C library."""
    function = _mallinfo2()
    if function is None:
        return 0
    info = function()
    return int(info.uordblks + info.hblkhd)


def _command_line(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return f"pid {pid}"
    return text.strip()[:200] or f"pid {pid}"
