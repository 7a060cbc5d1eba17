"""Delays on the CUDA streams of a rank, and a watch for waits on the host. Runs in ranks only.

A hook that reads a result too early, or gives memory back too early, is mostly lucky: the
operation that it did not wait for is over by then. So the kit puts work in front of that
operation which is sure to take longer. In every step after the first, a rank is late in one of two
ways and its peers in the other, and they swap in the next step (:func:`late`):

compute         a slow kernel lies on the stream that backward runs on, in front of all gradients
communication   slow kernels lie on every stream of torch's pool, from which backends, callbacks
                and ``torch.cuda.Stream()`` take their streams. They lie in front of the work that
                the step's hook calls enqueue there, and again each time a hook enters a stream of
                its own. When a call has returned, blocks of the sizes that it may have given back
                are taken from the allocator, filled with NaN, and given back.

A hook whose streams wait for each other, as events make them, is right under any delay: the length
of the delays decides whether a wrong hook is caught, never whether a right one passes. Nothing
here waits on the host, and gradients are read on the stream on which DDP reads the futures, with
no other stream in between.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from conformance.ranks.instruments.subject_calls import SubjectCalls, line_of_subject
from conformance.records.recorder import Recorder
from conformance.torch_versions.private import busy_device

# About 0.3 s of a GPU's clock: far more than a host takes from a hook's call to the read of its
# result.
CYCLES = 600_000_000
# Of each size. All are taken before any is given back, so that one of them is the block that the
# hook gave back.
BLOCKS = 8
# The number of streams that torch's pool has of each priority; it hands them out in turn.
POOL = 32
_CALLS = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
)
# The words of torch's warning, see torch.cuda.set_sync_debug_mode.
_SYNCHRONISES = "called a synchronizing"


def late(rank: int, step: int) -> str:
    """Return ``compute`` or ``communication``, which is late on a rank; '' in the first step."""
    if step == 0:
        return ""
    return ("compute", "communication")[(rank + step) % 2]


def record_device_wait(recorder: Recorder, calls: SubjectCalls, line: str) -> None:
    """Record that a line of the subject waited for the device on the host."""
    recorder.event("waited_for_device", call=calls.last, where=line)


class Streams:
    """The streams of one rank.

    Args:
        rank: of this process.
        device: of its tensors.
        sizes: the numbers of elements of blocks that a hook may have given back.
        waited: called with the line of the subject that waits for the device on the host, inside
            the hook.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        sizes: Iterable[int],
        waited: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._device = device
        self._sizes = sorted({*sizes})
        self._waited = waited
        self._pool = [
            torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(POOL)
        ]
        self._watching: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._late = ""
        self._pool_is_late = False

    def install(self) -> None:
        """Delay each stream that is entered, by any code, while communication is late."""
        self._load()
        enter = torch.cuda.StreamContext.__enter__

        def entering(context: torch.cuda.StreamContext) -> Any:
            entered = enter(context)
            if self._pool_is_late and context.stream is not None:
                busy_device(CYCLES)
            return entered

        torch.cuda.StreamContext.__enter__ = entering  # type: ignore[method-assign]

    def before_backward(self, step: int) -> None:
        """Put the step's delay in front of its gradients."""
        self._late = late(self._rank, step)
        self._pool_is_late = False
        if self._late == "compute":
            busy_device(CYCLES)

    def after_backward(self) -> None:
        """Delay nothing more: the step is over."""
        self._late = ""
        self._pool_is_late = False

    def before_hook(self) -> None:
        """Delay the work that this step's hook calls enqueue on other streams; watch for waits."""
        if self._late == "communication" and not self._pool_is_late:
            for stream in self._pool:
                with torch.cuda.stream(stream):
                    busy_device(CYCLES)
            # Only now: the kit's own streams must not be delayed twice.
            self._pool_is_late = True
        self._watching = _watching(self._waited)
        self._watching.__enter__()

    def after_hook(self) -> None:
        """Overwrite the memory that the hook has given back."""
        self._watching.__exit__(None, None, None)
        if self._late == "communication":
            self._fill()

    def _load(self) -> None:
        """Run the kit's own kernels once, and take their memory.

        The first launch of a kernel may wait for the whole device (CUDA programming guide, lazy
        loading), and so may an allocation. In a delayed step everything would then be in time.
        """
        for stream in self._pool:
            with torch.cuda.stream(stream):
                busy_device(1)
        self._fill()

    def _fill(self) -> None:
        kinds = itertools.product(self._sizes, (torch.float32, torch.float16), range(BLOCKS))
        blocks = [
            torch.full((size,), torch.nan, dtype=dtype, device=self._device)
            for size, dtype, _ in kinds
        ]
        del blocks


@contextlib.contextmanager
def _watching(waited: Callable[[str], None]) -> Iterator[None]:
    """Notice waits for the device on the host.

    torch's own debug mode notices most of them; the calls that it does not cover are replaced.
    """
    mode = torch.cuda.get_sync_debug_mode()
    originals = [(owner, name, getattr(owner, name)) for owner, name in _CALLS]

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            waited(line_of_subject())
            return original(*args, **kwargs)

        return noted

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if _SYNCHRONISES in str(message):
            waited(line_of_subject())

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        for owner, name, original in originals:
            setattr(owner, name, noting(original))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            for owner, name, original in originals:
                setattr(owner, name, original)
