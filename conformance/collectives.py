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

# Of each kernel, the place of the argument that holds what this rank gives; -1 where it gives nothing.
_OPS = {
    **{"allreduce_": 0, "allreduce_coalesced_": 0, "allgather_": 1, "_allgather_base_": 1},
    **{"reduce_scatter_": 1, "_reduce_scatter_base_": 1, "broadcast_": 0, "reduce_": 0, "gather_": 1, "scatter_": 1},
    **{"alltoall_": 1, "alltoall_base_": 1, "barrier": -1},
}
_POINT_TO_POINT = {"send": 0, "recv_": -1}  # kept, but not waited for: waiting for a receive twice does not end on Gloo


class CollectiveRecorder:
    """Keeps the collectives of this process and what they were given; can make the next one raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Never emptied. Gloo's worker destroys a Work under its queue's mutex, and with it Python callbacks, for
        # which it needs the GIL; an overridden kernel enqueues with the GIL held. Were ours not the last reference,
        # the two would wait for each other.
        self._works: list[Any] = []
        self._kept: list[Any] = []
        self._drained = 0
        self._library: Any = None
        self._sent: list[tuple[str, int]] = []
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
            for name, given in {**_OPS, **_POINT_TO_POINT}.items():
                try:
                    kernel = torch.library.get_kernel(f"c10d::{name}", "CPU")
                except (RuntimeError, ValueError):
                    continue
                recorded = self._recording(kernel, name, given, self._works if name in _OPS else self._kept)
                self._library.impl(name, recorded, "CPU", with_keyset=True, allow_override=True)

    def drain(self) -> None:
        """Wait until every collective issued so far is over, whether it succeeded or not."""
        with self._lock:
            works, self._drained = self._works[self._drained :], len(self._works)
        for work in works:
            with contextlib.suppress(RuntimeError):  # a failed collective is over too
                work.wait()

    def take_sent(self) -> list[tuple[str, int]]:
        """Return (kernel, bytes that this rank gave) of every collective since the last call, in the order of their start."""
        with self._lock:
            sent, self._sent = self._sent, []
        return sent

    def _recording(self, kernel: Any, name: str, given: int, works: list[Any]) -> Callable[..., Any]:
        def recorded(keyset: Any, *args: Any) -> Any:
            with self._lock:
                self._sent.append((name.strip("_"), _bytes(args[given]) if given >= 0 else 0))
                failure, self.raise_next = self.raise_next, None
            if failure is not None:
                raise failure()
            result = kernel.call_boxed(keyset, *args)
            work = result[-1] if isinstance(result, (tuple, list)) else result
            with self._lock:
                works.append(work)
            return result

        return recorded


def _bytes(given: Any) -> int:
    """Return the bytes of a tensor, or of tensors in lists of lists."""
    if isinstance(given, torch.Tensor):
        if given.is_sparse:
            return _bytes([given._indices(), given._values()])
        return given.numel() * given.element_size()
    return sum(map(_bytes, given))
