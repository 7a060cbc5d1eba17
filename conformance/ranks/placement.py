"""Placement of a rank: the backend's module, the settings and the device of its profile.

Placement comes before anything else of a run. A backend reads its environment only once, and a
process group belongs to the device that is current when the group is made. Runs in ranks only.
"""

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from conformance.records.files import MEETING
from conformance.scenarios.profiles import Profile

# When a group's own timeout expires, NCCL writes into the rank's folder, not into /tmp.
_DUMPS = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")
# With fewer hardware queues, streams that share a queue wait for each other although no event
# orders them. With all of them, a process takes several times as long to start the device (on an
# H200 1.1 to 1.5 s in place of 0.2 to 0.4 s), and processes take turns at that.
_ALL_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# torch's dispatch keys; devices of other packages share one.
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "hpu": "HPU"}


def place_on_machine(folder: Path, rank: int) -> int:
    """Return the number of this rank among the ranks of its machine.

    On several machines the number comes from the environment, as torchrun passes it.

    Args:
        folder: the run's.
        rank: global rank.
    """
    if (folder / MEETING).exists():
        return int(os.environ["LOCAL_RANK"])
    return rank


def take_place(
    profile: Profile, place: int, folder: str = "", *, separates_streams: bool = False
) -> torch.device:
    """Make this process a rank of the profile and return its device, now the current one.

    Args:
        place: the number of this rank on its machine.
        folder: the folder of this rank's record; '' if it keeps none.
        separates_streams: whether no two streams of a CUDA device may share a hardware queue.
    """
    for name, value in profile.environment:
        os.environ.setdefault(name, value)
    if separates_streams:
        os.environ.setdefault(*_ALL_QUEUES)
    if profile.imports:
        importlib.import_module(profile.imports)
    if profile.device == "cpu":
        return torch.device("cpu")
    if folder:
        for name in _DUMPS:
            os.environ[name] = f"{folder}/nccl_trace_"
    module: Any = torch.get_device_module(profile.device)
    device = torch.device(profile.device, place % module.device_count())
    module.set_device(device)
    return device


def dispatch_key(profile: Profile) -> str:
    """Return the key under which torch keeps the kernels of the profile's device."""
    return _DISPATCH_KEYS.get(profile.device, "PrivateUse1")


def device_module(device: torch.device) -> Any:
    """Return torch's module for a device, such as ``torch.cuda``; None for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)
