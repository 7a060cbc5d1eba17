"""Probes the backend and the devices of a profile by trying them. Runs in a forked process only.

A process that has started CUDA cannot be forked any more, so neither the host nor a lane may even
count the devices. And a backend that torch was built with may still fail on this machine, so the
forked process makes a process group of size one and sums a tensor.
"""

import contextlib
import ctypes
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.placement import take_place
from conformance.scenarios.profiles import Profile


def probe_profile(profile: Profile) -> dict[str, Any]:
    """Probe the backend and the devices of a profile, and return the result as plain data for JSON.

    Returns:
        At most one of three reasons why the profile cannot be run: ``error``, the backend's module
        cannot be imported; ``unknown``, torch knows no such backend; ``fails``, the backend cannot
        sum over one rank. For a profile with devices ``devices`` is their number, ``names`` and
        ``memory`` (in bytes) describe each of them, ``nccl`` is the version of NCCL that is loaded,
        and ``nccl_of_torch`` the version that torch was built with.
    """
    try:
        if profile.imports:
            importlib.import_module(profile.imports)
    except Exception as error:
        return {"error": f"importing {profile.imports} raised {type(error).__name__}: {error}"}
    known = dist.Backend.backend_list
    if profile.backend not in known:
        names = ", ".join(name for name in known if name != "undefined")
        return {"unknown": f"torch knows no backend {profile.backend!r}: it has {names}"}
    found: dict[str, Any] = {}
    if profile.device != "cpu":
        found |= _devices(profile.device)
        if not found["devices"]:
            return found
    is_available = getattr(dist, f"is_{profile.backend}_available", lambda: True)
    if not is_available():
        return {"fails": f"this torch was built without {profile.backend}"}
    if profile.backend == "nccl":
        found |= _nccl()
    try:
        _sum_over_one_rank(profile)
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
        found["fails"] = f"{profile.backend} cannot sum a tensor on {profile.device}: {reason}"
    return found


def _devices(device_type: str) -> dict[str, Any]:
    """Return how many devices of a type there are, and which."""
    try:
        module: Any = torch.get_device_module(device_type)
        count = int(module.device_count()) if module.is_available() else 0
    except (RuntimeError, AttributeError):
        return {"devices": 0}
    found: dict[str, Any] = {"devices": count}
    # Modules of third parties may have neither of these functions.
    with contextlib.suppress(AttributeError):
        found["names"] = [module.get_device_name(index) for index in range(count)]
        found["memory"] = [
            module.get_device_properties(index).total_memory for index in range(count)
        ]
    return found


def _nccl() -> dict[str, Any]:
    """Return the version of NCCL that is loaded, and the version that torch was built with."""
    built_with = list(torch.cuda.nccl.version())[:3]
    loaded = built_with
    # LD_PRELOAD may have replaced the library, so the loaded library itself is queried.
    with contextlib.suppress(OSError, AttributeError):
        code = ctypes.c_int()
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        if library.ncclGetVersion(ctypes.byref(code)) == 0:
            loaded = [code.value // 10000, code.value // 100 % 100, code.value % 100]
    return {"nccl": loaded, "nccl_of_torch": built_with}


def _sum_over_one_rank(profile: Profile) -> None:
    """Sum a tensor of ones in a group of this process alone. Raises: any error of the backend."""
    device = take_place(profile, 0)
    dist.init_process_group(profile.backend, store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor)
    if tensor.tolist() != [1.0, 1.0, 1.0]:
        raise RuntimeError(f"the sum of the ones of one rank is {tensor.tolist()}")
    dist.destroy_process_group()
