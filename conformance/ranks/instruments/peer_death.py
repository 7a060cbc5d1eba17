"""A peer that dies between two collectives: as it starts the last one of a step, when those before it are over on all ranks.

Which is the last is known from the step before, and only where all ranks started the same collectives there, in the same order:
otherwise one might wait here for what its peer starts later.
"""

import datetime
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

from conformance.ranks.process_groups import everybody
from conformance.records.files import PEER_DIED

LEAVES = 1  # the rank that dies


class PeerDeath:
    """Counts the collectives that a rank starts together with all others, and ends the process of rank 1 at the last one of a step.

    Args:
        rank, world: of this process.
        signals: the kit's own store.
        settle: waits until the results of all collectives of this rank are there.
        timeout: seconds that ranks wait for each other at most.

    Attributes:
        reached: this rank has started the last collective of the step that it is to die in, or would have.
    """

    def __init__(self, rank: int, world: int, signals: Any, settle: Callable[[], None], timeout: float) -> None:
        self._rank, self._world, self._signals, self._settle, self._timeout = rank, world, signals, settle, timeout
        self._started: list[dict[str, Any]] = []
        self._last = 0  # the number of the collective to die at, from 1; 0 is none
        self.reached = False

    def start_step(self, dies: bool) -> None:
        """Count anew; where rank 1 is to die in this step, compare what ranks have started in the one that is over."""
        if dies:
            started = hashlib.sha256(json.dumps(self._started, sort_keys=True).encode()).hexdigest()
            self._signals.set(f"started/{started}/{self._rank}", "1")
            everybody(self._signals, "counted", self._rank, self._world, self._timeout)
            alike = self._signals.check([f"started/{started}/{rank}" for rank in range(self._world)])
            self._last = len(self._started) if alike else 0
        self._started = []

    def issued(self, fingerprint: dict[str, Any]) -> None:
        """Take note of a collective before it begins; at the last one wait for what came before, and for the other ranks, and die."""
        if len(fingerprint["group"]) < self._world:
            return
        self._started.append(fingerprint)
        if len(self._started) == self._last:
            self._settle()
            self.reached = True
            self._signals.set(f"last/{self._rank}", "1")
            if self._rank == LEAVES:
                others = [f"last/{rank}" for rank in range(self._world)]
                self._signals.wait(others, datetime.timedelta(seconds=self._timeout))
                os._exit(PEER_DIED)

    def end(self) -> None:
        """Let rank 1 go on where this rank has not come so far."""
        self._signals.set(f"last/{self._rank}", "1")
