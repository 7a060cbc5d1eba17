"""What a machine can run of a profile, found out by doing it. Runs in a forked process of the host's, and in no other.

A process that has started CUDA cannot be forked any more, so neither the host nor a lane may ask for as much as the number of
devices. And a backend that torch was built with may still fail: so the process makes a group of itself alone, and sums a tensor.
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


def look(profile: Profile) -> dict[str, Any]:
    """Return what this machine has for a profile, as JSON has it.

    ``error``: why the backend's module cannot be imported; ``unknown``: that torch knows no such backend; ``fails``: why it cannot
    sum over one rank; each is absent where there is none. ``devices``: how many of the type; ``names`` and ``memory``, in bytes,
    of each; ``nccl``: the version that is loaded; ``nccl of torch``: the one that torch was built with.
    """
    found: dict[str, Any] = {}
    try:
        if profile.imports:
            importlib.import_module(profile.imports)
    except Exception as error:
        return {"error": f"importing {profile.imports} raised {type(error).__name__}: {error}"}
    known, built = dist.Backend.backend_list, getattr(dist, f"is_{profile.backend}_available", lambda: True)
    if profile.backend not in known:
        return {"unknown": f"torch knows no backend {profile.backend!r}: it has {', '.join(name for name in known if name != 'undefined')}"}
    if profile.device != "cpu":
        found |= _devices(profile.device)
        if not found["devices"]:
            return found
    if not built():
        return {"fails": f"this torch was built without {profile.backend}"}
    if profile.backend == "nccl":
        found |= _nccl()
    try:
        _sum_alone(profile)
    except Exception as error:
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
        found["fails"] = f"{profile.backend} cannot sum a tensor on {profile.device}: {said}"
    return found


def _devices(kind: str) -> dict[str, Any]:
    """Return how many devices of a type there are, and which."""
    try:
        module: Any = torch.get_device_module(kind)
        count = int(module.device_count()) if module.is_available() else 0
    except (RuntimeError, AttributeError):
        return {"devices": 0}
    found: dict[str, Any] = {"devices": count}
    with contextlib.suppress(AttributeError):
        found["names"] = [module.get_device_name(index) for index in range(count)]
        found["memory"] = [module.get_device_properties(index).total_memory for index in range(count)]
    return found


def _nccl() -> dict[str, Any]:
    """Return NCCL's version as it is loaded, which LD_PRELOAD may have changed, and as torch was built with."""
    of_torch = list(torch.cuda.nccl.version())[:3]
    loaded = of_torch
    with contextlib.suppress(OSError, AttributeError):
        code = ctypes.c_int()
        if ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetVersion(ctypes.byref(code)) == 0:
            loaded = [code.value // 10000, code.value // 100 % 100, code.value % 100]
    return {"nccl": loaded, "nccl of torch": of_torch}


def _sum_alone(profile: Profile) -> None:
    device = take_place(profile, 0)
    dist.init_process_group(profile.backend, store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor)
    if tensor.tolist() != [1.0, 1.0, 1.0]:
        raise RuntimeError(f"of one rank's ones it makes {tensor.tolist()}")
    dist.destroy_process_group()
