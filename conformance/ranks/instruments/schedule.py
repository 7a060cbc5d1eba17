"""The order in which ranks enter the subject and callbacks run, if a scenario prescribes one.

The order is forced through the store, never by time:

``rank0_first``  peers enter a call of the hook after rank 0 has left it
``seeded``       at each call, ranks enter one after another in an order drawn from the seed;
                 callbacks that the hook has attached to futures run after the step's last call has
                 returned, in an order drawn from the seed too, which differs between ranks
``slow``         ranks enter freely, but the step's last call begins when all collectives that the
                 rank has issued are over, as in a backward that takes longer than communication

A rank that is about to wait counts as having left, and its callbacks run. Some waits cannot be
seen, such as a loop that polls; the schedule is then given up after a while. So a schedule never
makes a right hook hang.
"""

import datetime
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.instruments.subject_calls import SubjectCalls, line_of_subject
from conformance.records.recorder import Recorder
from conformance.scenarios.model import Scenario
from conformance.torch_versions.private import AnyFuture, on_new_group

# Paid once, and only by a hook whose wait cannot be seen.
PATIENCE = datetime.timedelta(seconds=3)


class Schedule:
    """The schedule of one rank.

    Args:
        scenario: has the order (one of the above, or ``free``) and the seed.
        rank: of this process.
        world: number of processes.
        signals: the store through which ranks signal each other.
        recorder: receives ``waited`` and ``gate`` events.
        calls: the calls into the subject.
        records_waits: record each wait for a peer inside the subject.
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        world: int,
        signals: dist.Store,
        recorder: Recorder,
        calls: SubjectCalls,
        *,
        records_waits: bool = False,
    ) -> None:
        self._order = scenario.order
        self._seed = scenario.seed
        self._rank = rank
        self._world = world
        self._signals = signals
        self._recorder = recorder
        self._calls = calls
        self._records_waits = records_waits
        self._call = -1
        self._given_up = False
        self._callbacks: _Callbacks | None = None
        # A serialised collective waits before its callback could run; an ordered backend runs each
        # callback as it is attached.
        if scenario.order == "seeded" and not scenario.serialised and not scenario.profile.ordered:
            self._callbacks = _Callbacks(f"{scenario.seed} {rank}", self._give_up)

    def install(self) -> None:
        """Watch hooks as they wait, make a group or attach a callback."""
        if self._signals_calls:
            self._watch_waits()
        if self._callbacks:
            self._callbacks.install(self._calls)

    def enter(self, call: int) -> None:
        """Wait for this rank's turn to enter the subject."""
        self._call = call
        before = self._before(call)
        if before is not None and not self._given_up:
            try:
                self._signals.wait([f"left/{call}/{before}"], PATIENCE)
            except RuntimeError:
                # Once is enough: each further call would wait as long again.
                self._given_up = True
                self._give_up()

    def left(self, call: int, is_last: bool) -> None:
        """Signal that this rank has left the call; release callbacks after the step's last one."""
        self._announce(call)
        if self._callbacks and is_last:
            self._callbacks.release(call)

    def let_go(self) -> None:
        """Let the peers in and release callbacks, since this rank is about to wait for them."""
        self._announce(self._call)
        if self._callbacks:
            self._callbacks.release(self._call)

    def holds(self, future: Any) -> bool:
        """Whether a future stands for a callback that is held, and that nobody has released."""
        return self._callbacks is not None and self._callbacks.holds(future)

    @property
    def _signals_calls(self) -> bool:
        """Whether peers wait for this rank's calls."""
        return self._order == "seeded" or (self._order == "rank0_first" and self._rank == 0)

    def _before(self, call: int) -> int | None:
        """Return the rank that enters before this one, if there is one."""
        if self._order == "rank0_first":
            return None if self._rank == 0 else 0
        if self._order in ("free", "slow"):
            return None
        turns = list(range(self._world))
        random.Random(f"{self._seed} {call}").shuffle(turns)
        turn = turns.index(self._rank)
        return turns[turn - 1] if turn else None

    def _announce(self, call: int) -> None:
        if self._signals_calls:
            self._signals.set(f"left/{call}/{self._rank}", "1")

    def _give_up(self) -> None:
        opened = "a rank neither returned nor waited: the schedule was given up"
        self._recorder.event("gate", call=self._call, opened=opened)

    def _watch_waits(self) -> None:
        """Let the peers in when this rank is about to wait for them inside its hook.

        To make a group is a wait for the peers too, but only once. A hook that does so in its
        first call is not recorded as waiting.
        """
        for owner, name in (
            (dist.Work, "wait"),
            (AnyFuture, "wait"),
            (torch.futures.Future, "wait"),
            (dist.Work, "synchronize"),
        ):
            original = getattr(owner, name)

            def waiting(this: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if self._calls.is_inside and not _is_done(this):
                    self._record_wait()
                self.let_go()
                return _original(this, *args, **kwargs)

            setattr(owner, name, waiting)
        on_new_group(lambda: self._announce(self._call))

    def _record_wait(self) -> None:
        # A wait on a stream of the hook's own delays neither backward nor the peers.
        if self._records_waits and not self._calls.is_on_another_stream:
            self._recorder.event("waited", call=self._calls.last, where=line_of_subject())


class _Held:
    """A callback that waits for its turn.

    Attributes:
        base: the future that it was attached to.
        callback: the callback.
        late: the future that stands for its result.
        ready: ``base`` as the callback receives it, once it is done.
    """

    def __init__(self, base: Any, callback: Callable[[Any], Any]) -> None:
        self.base = base
        self.callback = callback
        self.late = torch.futures.Future[Any]()
        self.ready: Any = None


class _Callbacks:
    """Holds the callbacks that a hook attaches to futures, and runs them on a thread of its own.

    When callbacks are released, those of collectives run first, after all of these collectives
    are over; then the callbacks that depend on them. If none is released for a while, the hook may
    be waiting for one: from then on callbacks are not held.
    """

    def __init__(self, seed: str, give_up: Callable[[], None]) -> None:
        self._seed = seed
        self._give_up = give_up
        self._of_collectives: list[Any] = []
        self._held: list[_Held] = []
        self._released: list[tuple[int, list[_Held]]] = []
        self._changed = threading.Condition()
        self._given_up = False

    def install(self, calls: SubjectCalls) -> None:
        """Hold each callback that is attached inside the subject."""
        then = AnyFuture.then
        get_future = dist.Work.get_future

        def noted_future(work: Any) -> Any:
            future = get_future(work)
            # Kept, to recognise the object when a callback has been attached to it.
            self._of_collectives.append(future)
            return future

        def held_then(this: Any, callback: Callable[[Any], Any]) -> Any:
            if self._given_up or not calls.is_inside:
                return then(this, callback)
            held = _Held(this, callback)
            with self._changed:
                self._held.append(held)
                self._changed.notify_all()
            then(this, lambda future: self._ready(held, future))
            return held.late

        AnyFuture.then = held_then
        dist.Work.get_future = noted_future  # type: ignore[method-assign]
        threading.Thread(target=self._run, name="conformance-schedule", daemon=True).start()

    def release(self, call: int) -> None:
        """Let the callbacks run that are held now."""
        with self._changed:
            held = self._held
            self._held = []
            if held:
                self._released.append((call, held))
                self._changed.notify_all()

    def holds(self, future: Any) -> bool:
        """Whether a future stands for a callback that has not been released."""
        with self._changed:
            return any(held.late is future for held in self._held)

    def _ready(self, held: _Held, future: Any) -> None:
        with self._changed:
            held.ready = future
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            call, pending = self._next_released()
            collectives = self._of_collectives
            first = [held for held in pending if any(held.base is one for one in collectives)]
            self._wait_until_ready(first, all)
            while pending:
                self._wait_until_ready(pending, any)
                with self._changed:
                    ready = [held for held in pending if held.ready is not None]
                pending = [held for held in pending if held not in ready]
                random.Random(f"{self._seed} {call} {len(pending)}").shuffle(ready)
                for held in ready:
                    _complete(held)

    def _next_released(self) -> tuple[int, list[_Held]]:
        """Wait for a release; if callbacks are held and none is released, give up."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._held or self._released))
            patience = PATIENCE.total_seconds()
            if not self._changed.wait_for(lambda: bool(self._released), patience):
                self._given_up = True
                self._give_up()
                self._released = [(-1, self._held)]
                self._held = []
            return self._released.pop(0)

    def _wait_until_ready(
        self, held: list[_Held], quantifier: Callable[[list[bool]], bool]
    ) -> None:
        """Wait until all, or any, of the futures that callbacks are attached to are done."""
        with self._changed:
            self._changed.wait_for(lambda: quantifier([one.ready is not None for one in held]))


def _complete(held: _Held) -> None:
    """Run a callback and complete its future, as ``then()`` does."""
    try:
        result = held.callback(held.ready)
    except Exception as error:
        held.late.set_exception(error)
    else:
        held.late.set_result(result)


def _is_done(this: Any) -> bool:
    """Whether a Work or a future is over, so that a wait for it does not wait."""
    return bool(this.is_completed() if isinstance(this, dist.Work) else this.done())
