"""Environment variables of a host and its ranks, and other facts about this machine."""

import os
import signal
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent

ENVIRONMENT = {
    # One thread per rank: torch's default makes a check 12 to 24 times slower on two cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_FR_BUFFER_SIZE": "256",
    # Older versions of torch have this name for the same setting.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "256",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DESYNC_DEBUG": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONUNBUFFERED": "1",
}


def describe_exit(status: int) -> str:
    """Return an exit status in words; a negative status is a signal."""
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def fast_folder() -> str | None:
    """Return /dev/shm if it can be written; None means the usual temporary folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
