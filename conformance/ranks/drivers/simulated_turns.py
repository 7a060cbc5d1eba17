"""Turns for simulated ranks: each has a thread, and one of them runs at a time.

A rank runs until its hook returns, or until it waits for a result that is not there. Then the next
rank has its turn. When no rank can go on, one collective is carried out. So the order is the same
in every run, and a hook that waits for its peers can be simulated.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.torch_versions.private import AnyFuture

# As it is before anybody watches which threads a hook starts.
_start = threading.Thread.start


class _Stopped(BaseException):
    """Ends the thread of a rank whose simulation is over; no hook means to catch it."""


class _Rank:
    """The thread of one rank.

    Args:
        call: the work of the rank.
        arrive: called in the thread whenever its turn begins.
    """

    def __init__(self, call: Callable[[], Any], arrive: Callable[[], None]) -> None:
        self._call = call
        self._arrive = arrive
        # Locks that one thread acquires and the other releases; semaphores take longer.
        self._may_run = _locked()
        self._is_done = _locked()
        self._is_ready: Callable[[], bool] = _always
        self._is_stopped = False
        self.is_over = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="conformance-rank", daemon=True)
        _start(self.thread)

    @property
    def can_go_on(self) -> bool:
        return not self.is_over and self._is_ready()

    def take_turn(self) -> None:
        """Let the rank run until it waits or ends."""
        self._may_run.release()
        self._is_done.acquire()

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """End this turn; go on in a later one, once a condition holds. Called in the thread."""
        self._is_ready = is_ready
        self._is_done.release()
        self._begin_turn()

    def stop(self) -> None:
        """End the thread."""
        if not self.is_over:
            self._is_stopped = True
            self.take_turn()
        self.thread.join()

    def _begin_turn(self) -> None:
        self._may_run.acquire()
        if self._is_stopped:
            raise _Stopped
        self._arrive()

    def _run(self) -> None:
        try:
            self._begin_turn()
            self.result = self._call()
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._is_done.release()


class Turns:
    """The threads of all simulated ranks.

    Attributes:
        threads: their identifiers.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._changes = 0  # collectives that were carried out, and ranks that ended

    @property
    def threads(self) -> frozenset[int]:
        return frozenset(self._ranks)

    def run(
        self,
        calls: list[Callable[[], Any]],
        arrive: Callable[[int], None],
        go_on: Callable[[], bool],
    ) -> list[Any]:
        """Return the results of the ranks.

        Args:
            calls: the work of each rank.
            arrive: called in the thread of a rank, with its number, whenever its turn begins.
            go_on: called when no rank can go on; carries out a collective, and returns whether
                there was one.

        Raises:
            TimeoutError: ranks wait, and no collective is left that could end their wait.
            Exception: of the first rank whose work raises one.
        """
        ranks = [
            _Rank(call, lambda number=number: arrive(number))  # type: ignore[misc]
            for number, call in enumerate(calls)
        ]
        self._ranks = {rank.thread.ident or 0: rank for rank in ranks}
        try:
            with _waits_end_turns(self):
                while not all(rank.is_over for rank in ranks):
                    able = [rank for rank in ranks if rank.can_go_on]
                    for rank in able:
                        rank.take_turn()
                        self._changes += rank.is_over
                        if rank.error is not None:
                            raise rank.error
                    if not able:
                        if not go_on():
                            raise TimeoutError("ranks wait for a collective that no rank issues")
                        self._changes += 1
        finally:
            for rank in ranks:
                rank.stop()
        return [rank.result for rank in ranks]

    def wait_until(self, is_ready: Callable[[], bool]) -> bool:
        """End the turn of the calling thread until a condition holds.

        Returns:
            Whether the condition holds now; it does not if the thread is none of a rank.
        """
        rank = self._ranks.get(threading.get_ident())
        if rank and not is_ready():
            rank.wait_until(is_ready)
        return is_ready()

    def poll(self, is_ready: Callable[[], bool]) -> bool:
        """Return whether a condition holds, after others had their turns if it does not.

        A rank may ask again and again: it goes on once something has changed.
        """
        seen = self._changes
        self.wait_until(lambda: is_ready() or self._changes > seen)
        return is_ready()


def _always() -> bool:
    return True


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@contextmanager
def _waits_end_turns(turns: Turns) -> Iterator[None]:
    """Let ranks that wait for a future, or poll it, end their turn: it completes in another."""
    kinds: tuple[Any, ...] = (AnyFuture, torch.futures.Future)
    methods = [(kind, name) for kind in kinds for name in ("wait", "done") if name in vars(kind)]
    originals = [(kind, name, vars(kind)[name]) for kind, name in methods]
    is_done = vars(AnyFuture)["done"]

    def waiting(original: Any) -> Any:
        def wait(future: Any) -> Any:
            turns.wait_until(lambda: is_done(future))
            return original(future)

        return wait

    def polling(original: Any) -> Any:
        def done(future: Any) -> bool:
            turns.poll(lambda: is_done(future))
            return bool(original(future))

        return done

    for kind, name, original in originals:
        setattr(kind, name, waiting(original) if name == "wait" else polling(original))
    try:
        yield
    finally:
        for kind, name, original in originals:
            setattr(kind, name, original)
