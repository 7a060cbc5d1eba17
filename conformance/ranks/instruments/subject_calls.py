"""The calls into the subject: their numbers, and the thread that is inside one.

All instruments of a rank share one object. The hook observer, or the driver of another kind of
subject, opens and closes the calls; the other instruments read the object to attribute their
events to a call.
"""

import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from conformance.ranks.placement import device_module


class SubjectCalls:
    """The calls of one rank into its subject.

    Args:
        any_thread: a collective belongs to the call even if another thread issues it. That holds
            for calls that run a whole backward, which autograd spreads over threads. A hook shares
            the process with DDP's threads, so that only its own thread counts.

    Attributes:
        last: the number of the last call that has begun; -1 before the first.
    """

    def __init__(self, *, any_thread: bool = False) -> None:
        self._any_thread = any_thread
        self._thread: int | None = None
        self._stream: Any = None
        self.last = -1

    def begin(self) -> int:
        """Count a call, which is entered later, and return its number."""
        self.last += 1
        return self.last

    def enter(self, device: torch.device | None = None) -> None:
        """Note that this thread enters the subject, on the current stream of a device."""
        self._thread = threading.get_ident()
        self._stream = _current_stream(device) if device else None

    def leave(self) -> None:
        """Note that the subject has returned."""
        self._thread = None

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside the subject."""
        return self._thread == threading.get_ident()

    @property
    def issues(self) -> bool:
        """Whether a collective that this thread issues belongs to the call."""
        return self._thread is not None if self._any_thread else self.is_inside

    @property
    def is_on_another_stream(self) -> bool:
        """Whether this thread has left the stream of backward, so that its waits delay nobody."""
        return self._stream is not None and _current_stream(self._stream.device) != self._stream


def line_of_subject() -> str:
    """Return the innermost line of code outside torch, the kit and the display of a warning."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), warnings.__file__)
    stack = traceback.extract_stack()
    frames = [frame for frame in stack if not frame.filename.startswith(own)]
    if not frames:
        return "somewhere"
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"


def _current_stream(device: torch.device) -> Any:
    current = getattr(device_module(device), "current_stream", None)
    return current() if current else None
