"""One line on the log if a training run stands still: where each rank is, and in which collective.

Between two sampled steps no rank waits for another on behalf of the watch. If one rank issues a
collective that the others do not, such as one barrier more, all ranks wait until the backend's own
timeout, which is 10 to 30 minutes by default. A thread of each rank looks at the thread that
trains, ten times in ``seconds``. A rank stands still if in that time its number of steps, its
number of collectives, and the Python instruction at which it is have not changed. Such a rank
writes its place into the store. The group's first rank reads the places of all ranks, and if

    every rank of the group stands still, and
    some rank is in code of ``torch.distributed``, in a backward pass or in DDP, or the numbers of
    collectives of the model's group differ between ranks

it logs a warning with all places, once. A rank that moves, such as one that evaluates the model
while the others wait for it at a barrier, holds the warning back. As long as no rank stands still,
the threads use neither the store nor the network.

The warning is no finding. It rests on a clock, and a run of one very long call on every rank, such
as a checkpoint that rank 0 writes while the others wait, is reported too. Numbered are the
collectives that Python code has started since the watch began, those of the hook among them.
Collectives that C++ code starts by itself, such as DDP's own allreduce, have no number: for them
the warning has the line of Python that waits. On a device collectives run after the call: the line
is the one that waits for the device, and the latest collective may be later than the one that
hangs. Not reported are ranks that have ended or cannot run Python code, and a run whose first rank
has ended its watch.
"""

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from conformance.watching.collectives import Tally
from conformance.watching.exchange import Exchange

log = logging.getLogger("conformance.watch")
LOOKS = 10  # looks at the training thread until it counts as standing still

_TORCH = os.path.dirname(torch.__file__) + os.sep
_KIT = os.path.dirname(os.path.dirname(__file__)) + os.sep
_WAITING = tuple(
    _TORCH + part + os.sep for part in ("distributed", "autograd", os.path.join("nn", "parallel"))
)


class Look(NamedTuple):
    """The state of a rank at one moment. Two equal ones in a row mean that it has not moved.

    Attributes:
        steps: the steps counted so far.
        counts: the collectives that Python code has started, by the name of the group.
        stack: the code and the instruction of each frame of the training thread, innermost first.
    """

    steps: int
    counts: dict[str, int]
    stack: list[tuple[CodeType, int]]


class StallReporter:
    """Watches the thread that trains, and reports if all ranks of a group stand still.

    Args:
        exchange: the ranks and their store.
        seconds: how long nothing may change.
        steps: returns the number of steps counted so far.
        thread: returns the identifier of the thread that trains.
    """

    def __init__(
        self,
        exchange: Exchange,
        seconds: float,
        steps: Callable[[], int],
        thread: Callable[[], int],
    ) -> None:
        self._exchange = exchange
        self._seconds = seconds
        self._steps = steps
        self._training_thread = thread
        self._tally = Tally()
        self._stop = threading.Event()
        self._store: dist.Store | None = None
        self._published = ""

    def start(self) -> None:
        self._tally.open()
        threading.Thread(target=self._run, name="conformance.watch", daemon=True).start()

    def stop(self) -> None:
        """Stop without waiting for anything. Further calls do nothing."""
        self._tally.close()
        self._stop.set()

    def _run(self) -> None:
        # The report is no part of the training: if it cannot be made, there is none.
        with contextlib.suppress(Exception):
            self._look_until_reported()

    def _look_until_reported(self) -> None:
        before = None
        unchanged = 0
        while not self._stop.wait(self._seconds / LOOKS):
            frame = sys._current_frames().get(self._training_thread())
            look = Look(self._steps(), dict(self._tally.counts), _stack(frame))
            if look != before:
                before = look
                unchanged = 0
                self._publish("")
            else:
                unchanged += 1
            # Looks are counted, and no time: a process that was suspended has not stood still.
            if unchanged >= LOOKS:
                self._publish(json.dumps(self._place(look, frame)))
                if self._exchange.rank == 0 and self._report():
                    return
            # A frame keeps its local variables alive, which may be large.
            del frame
        self._publish("")

    def _publish(self, text: str) -> None:
        """Write the place of this rank into the store; an empty one if it moves."""
        if text != self._published:
            self._open_store().set(_key(self._exchange.rank), text)
            self._published = text

    def _open_store(self) -> dist.Store:
        if self._store is None:
            self._store = self._exchange.open_store()
        return self._store

    def _place(self, look: Look, frame: FrameType | None) -> dict[str, Any]:
        latest = self._tally.latest
        return {
            "at": _position(frame),
            "waits": any(code.co_filename.startswith(_WAITING) for code, _ in look.stack),
            "steps": look.steps,
            "counts": look.counts,
            "latest": latest,
        }

    def _report(self) -> bool:
        """Log the places of all ranks, and return True, if all of them stand still."""
        store = self._open_store()
        places = []
        for rank in range(self._exchange.size):
            # Without a check, get() would wait for the key.
            text = store.get(_key(rank)) if store.check([_key(rank)]) else b""
            if not text:
                return False
            places.append(json.loads(text))
        # Groups other than the model's need not have the same ranks.
        counts = {place["counts"].get(self._exchange.model_group, 0) for place in places}
        differ = len(counts) > 1
        if not (differ or any(place["waits"] for place in places)):
            return False
        log.warning("%s", describe(places, self._exchange.ranks, self._seconds))
        return True


def _key(rank: int) -> str:
    return f"place/{rank}"


def describe(places: list[dict[str, Any]], ranks: tuple[int, ...], seconds: float) -> str:
    """Return the warning.

    Args:
        places: by rank.
        ranks: the global rank of each rank.
        seconds: how long nothing has changed.
    """
    lines = [f"no rank of the model's group has moved for {seconds:g} s:"]
    for rank, place in zip(ranks, places, strict=True):
        line = f"  rank {rank}: {place['at']}, after {place['steps']} steps; "
        if place["latest"]:
            method, number, group_name = place["latest"]
            line += (
                f"latest collective from Python: {method}, number {number} of group {group_name}"
            )
        else:
            line += "no collective from Python since the watch began"
        lines.append(line)
    return "\n".join(lines)


def _stack(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    stack = []
    while frame is not None:
        stack.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return stack


def _position(frame: FrameType | None) -> str:
    """Return the innermost function, and the innermost line outside torch and the kit."""
    while frame is not None and frame.f_code.co_filename.startswith(_KIT):
        frame = frame.f_back
    if frame is None:
        return "no Python code"
    function = frame.f_code.co_name
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _KIT)):
        frame = frame.f_back
    return f"in {function}, {frame.f_code.co_filename}:{frame.f_lineno}"
