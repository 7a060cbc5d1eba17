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

from conformance.groups import everybody
from conformance.run_folder import PEER_DIED

LEAVES = 1  # the rank that dies


class Departure:
    """Counts a rank's collectives, and ends the process of rank 1 at the last one of a step.

    Args:
        rank, world: of this process.
        signals: the kit's own store.
        settle: waits until the results of all collectives of this rank are there.
        timeout: seconds that ranks wait for each other at most.

    Attributes:
        expected: collectives of a step, where all ranks started the same ones; 0 where they did not, or not any.
        reached: this rank has started as many in the step that ``begin`` was called for.
    """

    def __init__(self, rank: int, world: int, signals: Any, settle: Callable[[], None], timeout: float) -> None:
        self._rank, self._world, self._signals, self._settle, self._timeout = rank, world, signals, settle, timeout
        self._started: list[dict[str, Any]] = []
        self.expected, self.reached, self._begun = 0, False, False

    def start_step(self) -> None:
        """Count anew."""
        self._started = []

    def begin(self) -> None:
        """Compare what ranks started in the step that is over, and have rank 1 die in this one."""
        shared = [fingerprint for fingerprint in self._started if len(fingerprint["group"]) == self._world]
        started = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()
        self._signals.set(f"started/{started}/{self._rank}", "1")
        everybody(self._signals, "counted", self._rank, self._world, self._timeout)
        alike = self._signals.check([f"started/{started}/{rank}" for rank in range(self._world)])
        self.expected, self._begun, self._started = len(shared) if alike else 0, True, []

    def issued(self, fingerprint: dict[str, Any]) -> None:
        """Take note of a collective before it begins; of the last one, wait for what came before, and for the other ranks, and die."""
        self._started.append(fingerprint)
        if not self._begun or len(fingerprint["group"]) < self._world:
            return
        if sum(len(one["group"]) == self._world for one in self._started) == self.expected:
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
