"""The failures that the kit causes: a rank dies, stays out of the hook, or a collective raises.

``peer_dies``          rank 1 ends its process as it enters the hook
``peer_dies_later``    rank 1 ends its process as it starts the last collective of the step
``peer_silent``        rank 1 stays out of the hook until rank 0 has failed
``collective_raises``  a collective of rank 1 raises (``raising_collective.py``)
"""

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from conformance.ranks.instruments.collective_recorder import CollectiveRecorder
from conformance.ranks.instruments.injected import Injected, outcome_of
from conformance.ranks.instruments.peer_death import PeerDeath
from conformance.ranks.instruments.raising_collective import RaisingCollective
from conformance.records.files import PEER_DIED
from conformance.records.recorder import Recorder
from conformance.scenarios.model import FAULTY_RANK, Scenario


class Faults:
    """The failures of one rank.

    Args:
        scenario: has the failure and the step in which it happens.
        rank, world: of this process.
        signals: the kit's own store.
        recorder: receives the ``fault`` event, and the gradients that the failure leaves.
        collectives: raises the injected error, and counts the collectives of each step.
        timeout: seconds that ranks wait for each other at most.
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        world: int,
        signals: dist.Store,
        recorder: Recorder,
        collectives: CollectiveRecorder,
        timeout: float,
    ) -> None:
        self._kind = scenario.fault.kind
        self._step = scenario.fault.step
        self._last = self._step + scenario.fault.attempts - 1
        self._reads_gradients = not scenario.profile.ordered
        self._rank = rank
        self._signals = signals
        self._recorder = recorder
        self._collectives = collectives
        self._timeout = timeout
        self._raising = RaisingCollective(scenario.fault.succeeding)
        collectives.raising = self._raising
        self._death: PeerDeath | None = None
        if self._kind == "peer_dies_later":
            self._death = PeerDeath(rank, world, signals, collectives.settle, timeout)
            collectives.peer_death = self._death

    def before_backward(self, step: int) -> bool:
        """Prepare a step's failure; return whether the step has one, or may have one."""
        is_due = self._kind != "none" and self._step <= step <= self._last
        if self._death:
            self._death.start_step(dies=is_due)
        if self._raises_here:
            self._raising.begin_step()
            if is_due:
                self._raising.arm(is_last_attempt=step == self._last)
        return is_due

    def after_backward(self) -> None:
        """End the step, once a backward without a failure, and the call after it, are over."""
        self._raising.end_step()

    @property
    def _raises_here(self) -> bool:
        return self._kind == "collective_raises" and self._rank == FAULTY_RANK

    def before_hook(self) -> None:
        """End this process, or keep it out of the hook, if the step has that failure."""
        if self._rank != FAULTY_RANK or self._recorder.step != self._step:
            return
        if self._kind == "peer_dies":
            os._exit(PEER_DIED)
        if self._kind == "peer_silent":
            patience = datetime.timedelta(seconds=self._timeout)
            self._signals.wait(["fault over/0"], patience)
            raise Injected("injected by the conformance kit: this rank stayed out of the hook")

    def run_backward(
        self, backward: Callable[[], object], parameters: dict[str, torch.nn.Parameter]
    ) -> bool:
        """Run the backward that cannot succeed, and record how the failure shows.

        Args:
            backward: runs the backward and, if there is one, the trainer's call after it.
            parameters: the model's parameters by name, whose gradients are recorded.

        Returns:
            Whether the failure has come. If not, the step had no collective to fail, and there are
            more attempts.
        """
        raised: BaseException | None = None
        # Forget the collectives so far: those of this backward are counted.
        self._collectives.take_sent()
        try:
            backward()
        except BaseException as error:
            raised = error
        self._raising.end_step()
        # A hook that issues no collective cannot be failed by one.
        unused = self._raises_here and not self._raising.raised_at
        started = len(self._collectives.take_sent())
        if self._death:
            unused = not self._death.reached
            self._death.end()
        has_come = raised is not None or (self._rank == FAULTY_RANK and not unused)
        if self._raising.is_issued:
            self._raising.settle()
            has_come = self._agree(has_come)
        if not has_come and self._recorder.step < self._last:
            return False
        self._recorder.event(
            "fault",
            fault=self._kind,
            unused=unused,
            started=started,
            place=self._raising.raised_at,
            **outcome_of(raised),
        )
        # If collectives lie on a stream, a read of a gradient waits for a peer that may never come.
        if self._reads_gradients:
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    self._recorder.tensor(f"{self._recorder.step}/grad/{name}", parameter.grad)
        # A silent rank may go on now.
        self._signals.set(f"fault over/{self._rank}", "1")
        return True

    def _agree(self, has_come: bool) -> bool:
        """Return whether the failure has come on this rank, or on the rank that fails.

        A peer whose backward succeeds would wait for that rank in the next step.
        """
        step = self._recorder.step
        if self._rank == FAULTY_RANK:
            if has_come:
                self._signals.set(f"failed/{step}", "1")
            self._signals.set(f"tried/{step}", "1")
        elif not has_come:
            self._signals.wait([f"tried/{step}"], datetime.timedelta(seconds=self._timeout))
            return bool(self._signals.check([f"failed/{step}"]))
        return has_come
