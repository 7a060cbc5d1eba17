"""Facts about this machine."""

import os
import signal
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def describe_exit(status: int) -> str:
    """Return an exit status in words; a negative status is a signal."""
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def fast_folder() -> str | None:
    """Return /dev/shm if it can be written; None means the usual temporary folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
