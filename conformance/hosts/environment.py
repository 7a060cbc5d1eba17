"""TODO: conformance/hosts/environment.py."""

import os
import signal
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def in_words(status: int) -> str:
    """Say how a process ended, by its exit status; negative for a signal."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


ENVIRONMENT = {
    # One thread per rank: torch's default makes a check 12 to 24 times slower on two cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_FR_BUFFER_SIZE": "256",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "256",  # the same, as older versions call it
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DESYNC_DEBUG": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONUNBUFFERED": "1",
}


def fast_folder() -> str | None:
    """/dev/shm where it can be written; else the usual temporary folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
