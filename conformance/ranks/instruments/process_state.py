"""The state that all libraries of a process share, in a form that two readings can be compared.

``snapshot`` maps a name to a short text, and a rule compares the texts. ``rng`` does the same for
the global random generators, which change with every number that is drawn.
"""

import contextlib
import ctypes
import gc
import hashlib
import os
import random
import signal
import sys
import threading
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from conformance.scenarios.profiles import CUDA

_WATCHED_MODULES = (
    "torch",
    "torch.Tensor",
    "torch.distributed",
    "torch.nn.functional",
    "torch.futures.Future",
    "builtins",
    "os",
    "time",
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGCHLD)


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
    return {name: _digest(state) for name, state in states.items()}


def snapshot() -> dict[str, str]:
    """Return the settings of the process that a hook has no business to change, as text."""
    on_cuda = {}
    if torch.cuda.is_initialized():
        on_cuda = {"current device": str(torch.cuda.current_device())}
    handlers = {number.name: signal.getsignal(number) for number in _SIGNALS}
    environment = sorted(os.environ.items())
    return {
        "torch default dtype": str(torch.get_default_dtype()),
        "torch default device": str(torch.get_default_device()),
        "grad mode": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "anomaly mode": str(torch.is_anomaly_enabled()),
        "intra-op threads": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.get_deterministic_debug_mode()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "flush denormals": str(_denormals_flushed()),
        **on_cuda,
        "default process group": str(id(dist.group.WORLD)) if dist.is_initialized() else "none",
        "warnings filters": repr(warnings.filters),
        "signal handlers": repr(handlers),
        "sys.excepthook": repr(sys.excepthook),
        "working directory": os.getcwd(),
        # Values may be secrets: records keep their digests only.
        "environment": " ".join(f"{key}={_digest(value.encode())}" for key, value in environment),
    }


def left_behind() -> dict[str, Any]:
    """Return the settings, threads, processes and files at the end of a run."""
    return {
        "process": snapshot(),
        "threads": threads(),
        "children": children(),
        "files": files_left(),
    }


class Patches:
    """The functions of torch and Python that have been replaced since this object was made.

    There are some thousand of them, and a forked process copies each page of memory in which one
    lies as soon as it touches the function. So they are compared only if a rule needs them, see
    ``Scenario.watches_process``.
    """

    def __init__(self) -> None:
        self._before = {name: self._members(owner) for name, owner in self._owners()}

    def found(self) -> list[str]:
        """Return the name and the new module of each function replaced; additions do not count."""
        found = []
        for name, owner in self._owners():
            for key, before in self._before[name].items():
                value = getattr(owner, key, before)
                if value is not before and value != before and self._is_function(value):
                    source = getattr(value, "__module__", None) or type(value).__name__
                    found.append(f"{name}.{key} (now from {source})")
        return found

    @staticmethod
    def _members(owner: Any) -> dict[str, Any]:
        """Return the functions of a module, or of a class with those that it inherits."""
        everything = dict(vars(owner))
        if isinstance(owner, type):
            everything = {key: getattr(owner, key, None) for key in dir(owner)}
        return {key: value for key, value in everything.items() if Patches._is_function(value)}

    @staticmethod
    def _is_function(value: Any) -> bool:
        return callable(value) and not isinstance(value, type)  # torch rebinds some classes itself

    @staticmethod
    def _owners() -> list[tuple[str, Any]]:
        owners = []
        for name in _WATCHED_MODULES:
            if name in sys.modules:
                owners.append((name, sys.modules[name]))
            else:
                module, _, attribute = name.rpartition(".")
                owners.append((name, getattr(sys.modules[module], attribute)))
        return owners


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
    found = []
    for task in os.listdir("/proc/self/task"):
        # A thread may end between the listing and the reading; its children then pass to another.
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/self/task/{task}/children") as file,
        ):
            found += file.read().split()
    return [_command_line(pid) for pid in found]


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
    return {"tensors": sum(storages.values()), "allocated": _allocated(), **of_device}


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


def _allocated() -> int:
    """Return the bytes in use of glibc's allocator; 0 for another C library."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _denormals_flushed() -> bool:
    smallest = torch.full((1,), 2.0**-149)
    return bool((smallest * torch.ones(1)).item() == 0.0)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _command_line(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return f"pid {pid}"
    return text.strip()[:200] or f"pid {pid}"
