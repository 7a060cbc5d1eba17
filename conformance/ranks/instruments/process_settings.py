"""The settings that all code of a process shares, in a form that two readings can be compared.

:func:`settings` maps a name to a short text, or to texts by key. Rules compare texts, and of two
mappings only the keys that both have: a logger that is made later, or a thread that has ended,
changes no setting. A reading takes less than half a millisecond. It is made at the start of a
rank, when the subject is registered, and at the end.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.hardware import real_affinity
from conformance.ranks.instruments.digest import digest_of_bytes
from conformance.torch_versions.private import (
    getters_of_flags,
    global_hooks,
    hooks_on_saved_tensors,
    print_options,
    timeouts_of,
)

Setting = str | dict[str, str]

# Flags of torch.backends. Those of a backend that this build of torch lacks are not read.
_BACKENDS = {
    "cudnn": ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32"),
    "cuda.matmul": (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    "mkldnn": ("enabled", "deterministic", "allow_tf32", "fp32_precision"),
    "mkldnn.matmul": ("fp32_precision",),
    "mkldnn.conv": ("fp32_precision",),
    "mkldnn.rnn": ("fp32_precision",),
    "opt_einsum": ("enabled", "strategy"),
    "quantized": ("engine",),
    "mkl.verbose": ("enable",),
    "mkldnn.verbose": ("level",),
}
# Settings of torch that belong to a block of code, beside those of autograd.
_MODES = (
    "torch default dtype",
    "torch default device",
    "intra-op threads",
    "deterministic algorithms",
    "filling of uninitialized memory",
    "float32 matmul precision",
    "flush denormals",
)
# Lines of /proc/self/status: the umask, privileges and huge pages; and masks of signals.
_OF_STATUS = ("Umask", "NoNewPrivs", "THP_enabled", "Seccomp")
_MASKS = {
    "SigBlk": "blocked signals",
    "SigIgn": "ignored signals",
    "SigCgt": "signals with a handler",
}


def settings() -> dict[str, Setting]:
    """Return the settings of the process that a subject has no business to change, as text."""
    found: dict[str, Setting] = {}
    for part in (_of_torch, _of_autograd, _of_backends, _of_python, _of_logging, _of_system):
        found.update(part())
    return found


def modes() -> dict[str, str]:
    """Return the settings that code sets for a block: modes of autograd, the default dtype.

    A reading takes some 20 microseconds.
    """
    of_torch = _of_torch()
    return {name: str(of_torch[name]) for name in _MODES} | {
        name: str(value) for name, value in _of_autograd().items()
    }


def _of_torch() -> dict[str, Setting]:
    found: dict[str, Setting] = {
        "torch default dtype": str(torch.get_default_dtype()),
        "torch default device": str(torch.get_default_device()),
        "intra-op threads": str(torch.get_num_threads()),
        "inter-op threads": str(torch.get_num_interop_threads()),
        "deterministic algorithms": str(torch.get_deterministic_debug_mode()),
        "filling of uninitialized memory": str(torch.utils.deterministic.fill_uninitialized_memory),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "flush denormals": str(_denormals_flushed()),
        "print options": repr(print_options()),
        "sharing strategy": torch.multiprocessing.get_sharing_strategy(),
        "default process group": str(id(dist.group.WORLD)) if dist.is_initialized() else "none",
        "timeouts of the default process group": str(timeouts_of(dist.group.WORLD))
        if dist.group.WORLD is not None
        else "none",
        "default timeout of process groups": str(dist.distributed_c10d.default_pg_timeout),
        "debug level of torch.distributed": str(dist.get_debug_level()),
        # A table of hooks that has grown is a change of every module, or of every optimizer.
        "global hooks": " ".join(f"{name}={len(hooks)}" for name, hooks in global_hooks().items()),
    }
    if torch.cuda.is_initialized():
        found["current device"] = str(torch.cuda.current_device())
    if numpy := sys.modules.get("numpy"):
        found["NumPy's handling of errors"] = str(numpy.geterr())
        found["NumPy's print options"] = str(numpy.get_printoptions())
    return found


def _of_autograd() -> dict[str, Setting]:
    return {
        "grad mode": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "anomaly mode": f"{torch.is_anomaly_enabled()} {torch.is_anomaly_check_nan_enabled()}",
        "autocast": " ".join(
            f"{device}={torch.is_autocast_enabled(device)},{torch.get_autocast_dtype(device)}"
            for device in ("cpu", "cuda")
        ),
        "autocast cache": str(torch.is_autocast_cache_enabled()),
        "hooks on saved tensors": hooks_on_saved_tensors(),
    }


def _of_backends() -> dict[str, Setting]:
    flags = {}
    for name, function in _getters():
        with contextlib.suppress(Exception):
            flags[name] = str(function())
    return {"flags of torch.backends": flags}


@functools.cache
def _getters() -> list[tuple[str, Callable[[], Any]]]:
    """Return the functions that read torch's flags, by name; those that this torch has."""
    found: list[tuple[str, Callable[[], Any]]] = []
    for backend, flags in _BACKENDS.items():
        owner: Any = torch.backends
        for part in backend.split("."):
            owner = getattr(owner, part, None)
        for flag in flags:
            # A property may raise on a build without the backend.
            with contextlib.suppress(Exception):
                getattr(owner, flag)
                found.append((f"{backend}.{flag}", functools.partial(getattr, owner, flag)))
    return [*found, *getters_of_flags().items()]


def _of_python() -> dict[str, Setting]:
    environment = sorted(os.environ.items())
    return {
        "warnings filters": repr(warnings.filters),
        "warnings.showwarning": _name_of(warnings.showwarning),
        "garbage collector": f"enabled={gc.isenabled()} thresholds={gc.get_threshold()} "
        f"debug={gc.get_debug()} callbacks={len(gc.callbacks)}",
        # Frozen objects are never collected.
        "garbage collector's frozen objects": FrozenObjects.text(),
        "sys.excepthook": repr(sys.excepthook),
        "sys.displayhook": _name_of(sys.displayhook),
        "sys.unraisablehook": _name_of(sys.unraisablehook),
        "threading.excepthook": _name_of(threading.excepthook),
        "sys.stdout": _identity_of(sys.stdout),
        "sys.stderr": _identity_of(sys.stderr),
        "sys.path": repr(sys.path),
        "finders of imports": f"{len(sys.meta_path)} {len(sys.path_hooks)}",
        "recursion limit": str(sys.getrecursionlimit()),
        "switch interval": str(sys.getswitchinterval()),
        "longest integer as text": str(sys.get_int_max_str_digits()),
        "flags of dlopen": str(sys.getdlopenflags()),
        "trace function": _name_of(sys.gettrace()),
        "profile function": _name_of(sys.getprofile()),
        "stack size of threads": str(threading.stack_size()),
        "default timeout of sockets": str(socket.getdefaulttimeout()),
        "start method of multiprocessing": str(multiprocessing.get_start_method(allow_none=True)),
        "fault handler": str(faulthandler.is_enabled()),
        "locale": locale.setlocale(locale.LC_ALL),
        # Values may be secrets: records keep their digests only.
        "environment": " ".join(
            f"{key}={digest_of_bytes(value.encode())}" for key, value in environment
        ),
    }


def _of_logging() -> dict[str, Setting]:
    loggers = {}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            loggers[name] = (
                f"level={logger.level} disabled={logger.disabled} propagate={logger.propagate} "
                f"handlers={len(logger.handlers)} filters={len(logger.filters)}"
            )
    root = logging.root
    return {
        "logging.disable": f"{root.manager.disable} {logging.raiseExceptions}",
        "root logger": f"level={root.level} disabled={root.disabled} "
        f"handlers={[type(handler).__name__ for handler in root.handlers]} "
        f"filters={len(root.filters)}",
        "loggers": loggers,
    }


def _of_system() -> dict[str, Setting]:
    return {
        "signal handlers": {
            number.name: repr(signal.getsignal(number)) for number in signal.Signals
        },
        "timers": {name: _timer(number) for name, number in _TIMERS.items()},
        "POSIX timers": _posix_timers(),
        "status of the process": dict(_status()),
        "working directory": os.getcwd(),
        "limits of resources": {
            name: str(resource.getrlimit(number)) for name, number in _LIMITS.items()
        },
        "scheduling of threads": _scheduling(),
        "rounding of floating point": str(_rounding()),
        "standard streams": " ".join(_target(fd) for fd in (0, 1, 2)),
    }


_TIMERS = {
    "real (alarm)": signal.ITIMER_REAL,
    "virtual": signal.ITIMER_VIRTUAL,
    "profiling": signal.ITIMER_PROF,
}
_LIMITS = {
    name: getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")
}


def _timer(number: int) -> str:
    """Return whether an interval timer is armed; the time that is left is no setting."""
    left, interval = signal.getitimer(number)  # type: ignore[arg-type]
    return "armed" if left or interval else "not armed"


def _posix_timers() -> str:
    """Return the number of timers that timer_create has made."""
    with contextlib.suppress(OSError), open("/proc/self/timers") as file:
        return str(sum(line.startswith("ID:") for line in file))
    return "0"


def _status() -> Iterator[tuple[str, str]]:
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in _OF_STATUS:
                yield name, value.strip()
            elif name in _MASKS:
                yield _MASKS[name], _names_of_signals(int(value, 16)) or "none"


def _names_of_signals(mask: int) -> str:
    """Return the names of the signals in a mask of the kernel's, whose first bit is signal 1."""
    names = {int(one): one.name for one in signal.Signals}
    numbers = (bit + 1 for bit in range(mask.bit_length()) if mask >> bit & 1)
    return " ".join(names.get(number, str(number)) for number in numbers)


def _scheduling() -> dict[str, str]:
    """Return the CPU affinity, the nice value and the policy of each thread.

    These belong to threads, and a callback may run on another thread than the hook.
    """
    found = {}
    for task in os.listdir("/proc/self/task"):
        # A thread may have ended since.
        with contextlib.suppress(OSError):
            number = int(task)
            cores = sorted(real_affinity(number))
            nice = os.getpriority(os.PRIO_PROCESS, number)
            policy = os.sched_getscheduler(number)
            found[task] = f"cores={cores} nice={nice} policy={policy}"
    return found


class FrozenObjects:
    """Whether the subject has frozen objects.

    To count the frozen ones takes longer than all other settings: there are a million. So one
    object of the kit's own is looked for among those that the collector still looks at.
    """

    _own: list[None] | None = None
    _seen = False

    @classmethod
    def text(cls) -> str:
        if cls._own is None:
            cls._own = []
        elif not any(one is cls._own for one in gc.get_objects()):
            cls._seen = True
        return "some by the subject" if cls._seen else "none by the subject"

    @classmethod
    def freeze(cls) -> None:
        """Freeze all objects; this is no change of the subject's."""
        cls.text()
        gc.freeze()
        cls._own = []


def _denormals_flushed() -> bool:
    smallest = torch.full((1,), 2.0**-149)
    return bool((smallest * torch.ones(1)).item() == 0.0)


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")


def _rounding() -> int:
    with contextlib.suppress(OSError, AttributeError):
        return int(_c_library().fegetround())
    return 0


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "closed"


def _name_of(value: Any) -> str:
    module = getattr(value, "__module__", "")
    name = getattr(value, "__qualname__", None) or type(value).__name__
    return "none" if value is None else f"{module}.{name}"


def _identity_of(value: Any) -> str:
    return f"{_name_of(type(value))} at {id(value):#x}"
