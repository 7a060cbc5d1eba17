"""Collectives on record: every one that this rank issues, from any thread, with its Work.

The kernels of ``c10d::*`` are overridden for the CPU key in this process, which sees direct calls on
a process group, callbacks on other threads and C++ alike. The override dies with the rank.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

_OPS = (
    *("allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_"),
    *("broadcast_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier"),
)
_POINT_TO_POINT = ("send", "recv_")  # kept, but not waited for: waiting for a receive twice does not end on Gloo


class CollectiveRecorder:
    """Counts and keeps the collectives of this process; can make the next one raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Never emptied. Gloo's worker destroys a Work under its queue's mutex, and with it Python callbacks, for
        # which it needs the GIL; an overridden kernel enqueues with the GIL held. Were ours not the last reference,
        # the two would wait for each other.
        self._works: list[Any] = []
        self._kept: list[Any] = []
        self._drained = 0
        self._library: Any = None
        self.count = 0
        self.raise_next: Callable[[], Exception] | None = None

    def install(self) -> None:
        """Override the kernels. Needs ``torch.library.get_kernel``.

        Raises:
            RuntimeError: this torch has no such function.
        """
        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(
                f"torch {torch.__version__} has no torch.library.get_kernel; recording collectives needs torch 2.10 or later"
            )
        self._library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in (*_OPS, *_POINT_TO_POINT):
                try:
                    kernel = torch.library.get_kernel(f"c10d::{name}", "CPU")
                except (RuntimeError, ValueError):
                    continue
                self._library.impl(
                    name, self._recording(kernel, self._works if name in _OPS else self._kept), "CPU", with_keyset=True, allow_override=True
                )

    def drain(self) -> None:
        """Wait until every collective issued so far is over, whether it succeeded or not."""
        with self._lock:
            works, self._drained = self._works[self._drained :], len(self._works)
        for work in works:
            with contextlib.suppress(RuntimeError):  # a failed collective is over too
                work.wait()

    def _recording(self, kernel: Any, works: list[Any]) -> Callable[..., Any]:
        def recorded(keyset: Any, *args: Any) -> Any:
            with self._lock:
                self.count += 1
                failure, self.raise_next = self.raise_next, None
            if failure is not None:
                raise failure()
            result = kernel.call_boxed(keyset, *args)
            work = result[-1] if isinstance(result, (tuple, list)) else result
            with self._lock:
                works.append(work)
            return result

        return recorded
