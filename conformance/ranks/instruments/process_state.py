"""What a process has that every library in it shares, read so that two readings can be compared.

``snapshot`` maps a name to a short text; a rule compares the texts. ``rng`` does so for the global
random generators, which change every time somebody draws a number.
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

_WATCHED_MODULES = ("torch", "torch.Tensor", "torch.distributed", "torch.nn.functional", "torch.futures.Future", "builtins", "os", "time")


def rng() -> dict[str, str]:
    """Digests of the global generators of torch (CPU, and ``cuda`` where it is in use), Python and NumPy (where it is imported).

    That of CUDA is kept on the host: to read it waits for no stream.
    """
    states = {"torch": bytes(torch.get_rng_state().numpy()), "python": str(hash(random.getstate())).encode()}
    if torch.cuda.is_initialized():
        states[CUDA] = bytes(torch.cuda.get_rng_state().numpy())
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = b" ".join(
            str(part).encode() if isinstance(part, (str, int, float)) else part.tobytes() for part in numpy.random.get_state()
        )
    return {name: _digest(state) for name, state in states.items()}


def snapshot() -> dict[str, str]:
    """Settings of the process that a hook has no business to change, as text."""
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
        **({"current device": str(torch.cuda.current_device())} if torch.cuda.is_initialized() else {}),
        "default process group": str(id(dist.group.WORLD)) if dist.is_initialized() else "none",
        "warnings filters": repr(warnings.filters),
        "signal handlers": repr({s.name: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGCHLD)}),
        "sys.excepthook": repr(sys.excepthook),
        "working directory": os.getcwd(),
        # Values may be secrets: records keep their digests only.
        "environment": " ".join(f"{key}={_digest(value.encode())}" for key, value in sorted(os.environ.items())),
    }


def left_behind() -> dict[str, Any]:
    """What a subject may have changed, or left, by the end of a run."""
    return {"process": snapshot(), "threads": threads(), "children": children(), "files": files_left()}


class Patches:
    """Which functions of torch and Python have been replaced since this object was made.

    They are some thousand, and a forked process copies each page of memory in which one lies when it takes it in hand. So they are
    looked for only where a rule asks, see ``Scenario.watches_process``.
    """

    def __init__(self) -> None:
        self._before = {name: self._members(owner) for name, owner in self._owners()}

    def found(self) -> list[str]:
        """Return ``name: where the new value comes from`` for each function replaced; additions are no patches."""
        return [
            f"{name}.{key} (now from {getattr(value, '__module__', None) or type(value).__name__})"
            for name, owner in self._owners()
            for key, before in self._before[name].items()
            if (value := getattr(owner, key, before)) is not before and value != before and self._is_function(value)
        ]

    @staticmethod
    def _members(owner: Any) -> dict[str, Any]:
        """The functions of a module, or of a class with those that it inherits; torch rebinds some classes itself."""
        everything = {key: getattr(owner, key, None) for key in dir(owner)} if isinstance(owner, type) else dict(vars(owner))
        return {key: value for key, value in everything.items() if Patches._is_function(value)}

    @staticmethod
    def _is_function(value: Any) -> bool:
        return callable(value) and not isinstance(value, type)

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
    """Names of the Python threads, ``(daemon)`` after those that do not keep the process alive.

    Left out: threads that C++ lent to a callback, and workers of an executor, which Python joins at exit.
    """
    executor = sys.modules.get("concurrent.futures.thread")
    workers = set(getattr(executor, "_threads_queues", ()))
    own = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread) and t not in workers]
    return sorted(t.name + (" (daemon)" if t.daemon else "") for t in own)


def let_threads_end(before: list[str], seconds: float = 1.0) -> None:
    """Give threads that are about to end the time to do so; one that stays costs ``seconds`` in all."""
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        named = thread.name + (" (daemon)" if thread.daemon else "")
        if named not in before and not isinstance(thread, threading._DummyThread):
            thread.join(max(0.0, end - time.monotonic()))


def children() -> list[str]:
    """Command lines of the processes that this one has started and not reaped."""
    found = []
    for task in os.listdir("/proc/self/task"):
        # A thread may end between the listing and the reading; another then has its children.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/children") as file:
            found += file.read().split()
    return [_command_line(pid) for pid in found]


def files_left() -> list[str]:
    """Files in the rank's own temporary directory."""
    temporary = os.environ["TMPDIR"]
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(temporary) for name in names)


def live_memory() -> dict[str, int]:
    """Bytes in tensors that Python can reach, and bytes that the C library's allocator has lent out.

    Where CUDA is in use, also what its caching allocator has lent out and reserved, of the current device. What streams still use
    is waited for first: until then it cannot be given back.
    """
    gc.collect()
    of_device = {}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        of_device = {CUDA: torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.layout == torch.strided and item.device.type in ("cpu", "cuda"):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return {"tensors": sum(storages.values()), "allocated": _allocated(), **of_device}


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def _allocated() -> int:
    """Bytes in use of glibc's allocator; 0 where there is none (another C library)."""
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
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()[:200] or f"pid {pid}"
    except OSError:
        return f"pid {pid}"
