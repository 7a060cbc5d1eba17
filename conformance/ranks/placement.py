"""A rank takes its place: the backend's module, the settings and the device of its profile. Runs in ranks only.

Before anything else of the run: what a backend reads of the environment it reads once, and the device that is current when
a process group is made is the group's.
"""

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from conformance.records.files import MEETING
from conformance.scenarios.profiles import Profile

# What NCCL writes when a group's own timeout expires goes into the rank's folder, not into /tmp.
_DUMPS = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")


def place_on_machine(folder: Path, rank: int) -> int:
    """Return which of its machine's ranks this one is: where a run has several machines it has been told, as torchrun tells.

    Args:
        folder: the run's.
        rank: global rank.
    """
    return int(os.environ["LOCAL_RANK"]) if (folder / MEETING).exists() else rank


def take_place(profile: Profile, place: int, folder: str = "") -> torch.device:
    """Make this process a rank of the profile; return its device, which is the current one from here on.

    Args:
        place: this rank's, on its machine.
        folder: of this rank's record; '' where it keeps none.
    """
    for name, value in profile.environment:
        os.environ.setdefault(name, value)
    if profile.imports:
        importlib.import_module(profile.imports)
    if profile.device == "cpu":
        return torch.device("cpu")
    for name in _DUMPS if folder else ():
        os.environ[name] = f"{folder}/nccl_trace_"
    module: Any = torch.get_device_module(profile.device)
    device = torch.device(profile.device, place % module.device_count())
    module.set_device(device)
    return device


def dispatch_key(profile: Profile) -> str:
    """Return the key under which torch keeps kernels for the profile's device; third parties have one in common."""
    return {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "hpu": "HPU"}.get(profile.device, "PrivateUse1")


def device_module(device: torch.device) -> Any:
    """Return torch's module for a device, ``torch.cuda`` for one of CUDA; None for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)
