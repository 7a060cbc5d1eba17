"""Delays on the streams of a rank, and who waits for them on the host. Runs in ranks only, on CUDA.

A hook that reads a result too early, or gives memory back too early, is mostly lucky: what it did not wait for is over by
then. So the kit puts work in front of it that is sure to be longer. In every step after the first a rank is late in one of
two ways, its peers in the other, and in the next step the other way round (:func:`late`):

compute         a kernel that takes its time lies on the stream that backward runs on, in front of all gradients
communication   such kernels lie on every stream of torch's pool, from which backends, callbacks and ``torch.cuda.Stream()`` take
                theirs, in front of what the step's hook calls put there, and again where one of them enters a stream of its own;
                when a call has returned, blocks of the sizes that it may have given back are taken from the allocator, filled with
                NaN, and given back

Whoever has one stream wait for the other, as events do, is right under any delay: how long they are decides whether a wrong hook
is caught, never whether a right one passes. Nothing here waits on the host, and gradients are read on the stream that DDP reads
the futures on, with no other in between.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from conformance.ranks.instruments.hook_observer import line_of_subject

CYCLES = 600_000_000  # about 0.3 s of a GPU's clock: far more than a host takes from a hook's call to the read of its result
BLOCKS = 8  # of each size, all taken before any is given back: one of them is what the hook gave back
POOL = 32  # streams that torch's pool has of each priority, taken in turn
_CALLS = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))
_SYNCHRONISES = "called a synchronizing"  # what torch's warning says, see torch.cuda.set_sync_debug_mode


def late(rank: int, step: int) -> str:
    """Return what is late on a rank in a step: ``compute``, ``communication``, or '' in the first."""
    if step == 0:
        return ""
    return ("compute", "communication")[(rank + step) % 2]


class Streams:
    """The streams of one rank.

    Args:
        rank: of this process.
        device: of its tensors.
        sizes: numbers of elements that a hook may have given memory for back.
        waited: called with the line of the subject that waited for the device on the host, inside the hook.
    """

    def __init__(self, rank: int, device: torch.device, sizes: Iterable[int], waited: Callable[[str], None]) -> None:
        self._rank, self._device, self._sizes, self._waited = rank, device, sorted({*sizes}), waited
        self._pool = [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(POOL)]
        self._watching: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._late, self._pool_is_late = "", False

    def install(self) -> None:
        """Take part in what torch does when a stream is entered, by whoever does so while a step's communication is late."""
        enter = torch.cuda.StreamContext.__enter__

        def entering(context: torch.cuda.StreamContext) -> Any:
            entered = enter(context)
            if self._pool_is_late and context.stream is not None:
                torch.cuda._sleep(CYCLES)
            return entered

        torch.cuda.StreamContext.__enter__ = entering  # type: ignore[method-assign]

    def before_backward(self, step: int) -> None:
        """Put the step's delay in front of its gradients."""
        self._late, self._pool_is_late = late(self._rank, step), False
        if self._late == "compute":
            torch.cuda._sleep(CYCLES)

    def after_backward(self) -> None:
        """Delay nothing more: the step is over."""
        self._late, self._pool_is_late = "", False

    def before_hook(self) -> None:
        """Put delays in front of what the step's hook calls put on other streams, and watch who waits."""
        if self._late == "communication" and not self._pool_is_late:
            for stream in self._pool:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(CYCLES)
            self._pool_is_late = True
        self._watching = _watching(self._waited)
        self._watching.__enter__()

    def after_hook(self) -> None:
        """Write over what the hook has given back."""
        self._watching.__exit__(None, None, None)
        if self._late == "communication":
            kinds = itertools.product(self._sizes, (torch.float32, torch.float16), range(BLOCKS))
            blocks = [torch.full((size,), torch.nan, dtype=dtype, device=self._device) for size, dtype, _ in kinds]
            del blocks


@contextlib.contextmanager
def _watching(waited: Callable[[str], None]) -> Iterator[None]:
    """Notice who waits for the device on the host: by torch's own debug mode, and by the calls that it does not cover."""
    mode, originals = torch.cuda.get_sync_debug_mode(), [(owner, name, getattr(owner, name)) for owner, name in _CALLS]

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
