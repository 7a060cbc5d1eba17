"""Facts about this machine."""

import os
import signal
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def host_command(*arguments: str) -> list[str]:
    """Return the command that runs ``host.py``, with no folder of the user's on the import path.

    Python 3.10 does not have the option -P: there ``host.py`` takes its own folder off the path.
    """
    no_folder = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *no_folder, str(PACKAGE / "host.py"), *arguments]


def describe_exit(status: int) -> str:
    """Return an exit status in words; a negative status is a signal."""
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def fast_folder() -> str | None:
    """Return /dev/shm if it can be written; None means the usual temporary folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
