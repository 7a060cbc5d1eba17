"""In which order ranks enter the hook and callbacks run, where a scenario says so. Order is forced through the store, never by time.

``rank0_first``  peers enter a call of the hook when rank 0 has left it
``seeded``       at each call ranks enter one after another, in an order that the seed draws; callbacks that the hook has attached
                 to futures run when the step's last call has returned, in an order that the seed draws too, another one on each rank

A rank that is about to wait counts as having left, and has its callbacks run. One that waits in a way that cannot be seen, such
as a loop that polls, has the schedule given up after a while: a schedule never makes a right hook hang.
"""

import datetime
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from conformance.scenarios.model import Scenario

PATIENCE = datetime.timedelta(seconds=3)  # only a hook that waits without being seen to costs it, once


class Schedule:
    """The schedule of one rank.

    Args:
        scenario: which says the order, one of the above or ``free``, and the seed. Callbacks are not held where it is serialised, nor
            where the backend runs each as it is attached.
        rank: of this process.
        world: number of processes.
        signals: the store that ranks tell each other through.
        is_inside: whether the caller's thread is inside the hook.
        waits: called when the hook is about to wait for a peer.
        stuck: called with the number of the call in which the schedule was given up.
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        world: int,
        signals: dist.Store,
        is_inside: Callable[[], bool],
        waits: Callable[[], None],
        stuck: Callable[[int], None],
    ) -> None:
        self._order, self._seed, self._rank, self._world = scenario.order, scenario.seed, rank, world
        self._signals, self._is_inside, self._waits, self._stuck = signals, is_inside, waits, stuck
        self._call, self._given_up = -1, False
        held = scenario.order == "seeded" and not scenario.serialised and not scenario.profile.ordered
        self._callbacks = _Callbacks(f"{scenario.seed} {rank}", lambda: stuck(self._call)) if held else None

    def install(self) -> None:
        """Take part in what torch does when a hook waits, makes a group or attaches a callback."""
        if self._order == "seeded" or (self._order == "rank0_first" and self._rank == 0):
            self._watch_waits()
        if self._callbacks:
            self._callbacks.install(self._is_inside)

    def enter(self, call: int) -> None:
        """Wait until it is this rank's turn to enter the hook."""
        self._call = call
        before = self._before(call)
        if before is not None and not self._given_up:
            try:
                self._signals.wait([f"left/{call}/{before}"], PATIENCE)
            except RuntimeError:
                self._given_up = True
                self._stuck(call)

    def left(self, call: int, is_last: bool) -> None:
        """Say that this rank has left the hook; after the step's last call, callbacks run."""
        self._announce(call)
        if self._callbacks and is_last:
            self._callbacks.release(call)

    def _before(self, call: int) -> int | None:
        """Return the rank that enters before this one, if there is one."""
        if self._order == "rank0_first":
            return None if self._rank == 0 else 0
        if self._order == "free":
            return None
        turns = list(range(self._world))
        random.Random(f"{self._seed} {call}").shuffle(turns)
        place = turns.index(self._rank)
        return turns[place - 1] if place else None

    def _announce(self, call: int) -> None:
        if self._order == "seeded" or (self._order == "rank0_first" and self._rank == 0):
            self._signals.set(f"left/{call}/{self._rank}", "1")

    def let_go(self) -> None:
        """Let the peers in, and callbacks run: this rank is about to wait for them."""
        self._announce(self._call)
        if self._callbacks:
            self._callbacks.release(self._call)

    def _watch_waits(self) -> None:
        """Let the peers in when this rank is about to wait for them inside its hook.

        Making a group waits for them too, once; a hook that does so in its first call is not said to wait.
        """
        for owner, name in ((dist.Work, "wait"), (torch._C.Future, "wait"), (torch.futures.Future, "wait"), (dist.Work, "synchronize")):
            original = getattr(owner, name)

            def waiting(this: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if self._is_inside() and not _is_done(this):
                    self._waits()
                self.let_go()
                return _original(this, *args, **kwargs)

            setattr(owner, name, waiting)
        make_group = dist.distributed_c10d._new_process_group_helper

        def making_group(*args: Any, **kwargs: Any) -> Any:
            self._announce(self._call)
            return make_group(*args, **kwargs)

        dist.distributed_c10d._new_process_group_helper = making_group


class _Held:
    """A callback that waits for its turn."""

    def __init__(self, base: Any, callback: Callable[[Any], Any]) -> None:
        self.base, self.callback, self.late = base, callback, torch.futures.Future[Any]()
        self.ready: Any = None  # the future that the callback gets, once it is done


class _Callbacks:
    """Holds the callbacks that a hook attaches to futures, and runs them on a thread of its own when they are released.

    First those of collectives, once all of these are through; then what depends on them. Where none is released for a while,
    the hook may be waiting for one: from then on they are not held.
    """

    def __init__(self, seed: str, stuck: Callable[[], None]) -> None:
        self._seed, self._stuck = seed, stuck
        self._of_collectives: list[Any] = []
        self._held: list[_Held] = []
        self._released: list[tuple[int, list[_Held]]] = []
        self._changed = threading.Condition()
        self._given_up = False

    def install(self, is_inside: Callable[[], bool]) -> None:
        then, get_future = torch._C.Future.then, dist.Work.get_future

        def noted_future(work: Any) -> Any:
            future = get_future(work)
            self._of_collectives.append(future)
            return future

        def held_then(this: Any, callback: Callable[[Any], Any]) -> Any:
            if self._given_up or not is_inside():
                return then(this, callback)
            held = _Held(this, callback)
            with self._changed:
                self._held.append(held)
                self._changed.notify_all()
            then(this, lambda future: self._ready(held, future))
            return held.late

        torch._C.Future.then = held_then  # type: ignore[method-assign, assignment]
        dist.Work.get_future = noted_future  # type: ignore[method-assign]
        threading.Thread(target=self._run, name="conformance-schedule", daemon=True).start()

    def release(self, call: int) -> None:
        """Have the callbacks run that are held now."""
        with self._changed:
            held, self._held = self._held, []
            if held:
                self._released.append((call, held))
                self._changed.notify_all()

    def _ready(self, held: _Held, future: Any) -> None:
        with self._changed:
            held.ready = future
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._held or self._released))
                if not self._changed.wait_for(lambda: bool(self._released), PATIENCE.total_seconds()):
                    self._given_up = True
                    self._stuck()
                    self._released, self._held = [(-1, self._held)], []
                call, pending = self._released.pop(0)
            first = [held for held in pending if any(held.base is future for future in self._of_collectives)]
            with self._changed:
                self._changed.wait_for(lambda first=first: all(held.ready is not None for held in first))  # type: ignore[misc]
            while pending:
                with self._changed:
                    self._changed.wait_for(lambda pending=pending: any(held.ready is not None for held in pending))  # type: ignore[misc]
                    ready = [held for held in pending if held.ready is not None]
                pending = [held for held in pending if held not in ready]
                random.Random(f"{self._seed} {call} {len(pending)}").shuffle(ready)
                for held in ready:
                    _complete(held)


def _complete(held: _Held) -> None:
    try:
        result = held.callback(held.ready)
    except Exception as error:  # as then() does
        held.late.set_exception(error)
    else:
        held.late.set_result(result)


def _is_done(this: Any) -> bool:
    """Whether a Work or a future is over, so that waiting for it is not waiting."""
    return bool(this.is_completed() if isinstance(this, dist.Work) else this.done())
