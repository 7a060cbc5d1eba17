"""A peer that dies between two collectives.

It dies as it starts the last collective of a step, when the collectives before it are over on all
ranks. The number of collectives is known from the step before, and only if all ranks started the
same collectives there, in the same order. Otherwise one rank might wait here for a collective that
its peer starts later.
"""

import datetime
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

from conformance.ranks.process_groups import everybody
from conformance.records.files import PEER_DIED
from conformance.scenarios.model import FAULTY_RANK


class PeerDeath:
    """Ends the process of rank 1 at the last collective that it starts together with all others.

    Args:
        rank, world: of this process.
        signals: the kit's own store.
        settle: waits until the results of all collectives of this rank are there.
        timeout: seconds that ranks wait for each other at most.

    Attributes:
        reached: this rank has started the last collective of the step in which rank 1 dies.
    """

    def __init__(
        self, rank: int, world: int, signals: Any, settle: Callable[[], None], timeout: float
    ) -> None:
        self._rank = rank
        self._world = world
        self._signals = signals
        self._settle = settle
        self._timeout = timeout
        self._started: list[dict[str, Any]] = []
        self._last = 0  # the number of the collective to die at, counted from 1; 0 is none
        self.reached = False

    def start_step(self, dies: bool) -> None:
        """Count anew; before the deadly step, compare the collectives of all ranks."""
        if dies:
            collectives = json.dumps(self._started, sort_keys=True)
            started = hashlib.sha256(collectives.encode()).hexdigest()
            self._signals.set(f"started/{started}/{self._rank}", "1")
            everybody(self._signals, "counted", self._rank, self._world, self._timeout)
            keys = [f"started/{started}/{rank}" for rank in range(self._world)]
            self._last = len(self._started) if self._signals.check(keys) else 0
        self._started = []

    def issued(self, fingerprint: dict[str, Any]) -> None:
        """Count a collective before it begins; at the last one wait for all ranks, and die."""
        # Other ranks know nothing of a collective in a smaller group.
        if len(fingerprint["group"]) < self._world:
            return
        self._started.append(fingerprint)
        if len(self._started) == self._last:
            # A rank that died earlier would fail the collectives before the last one too.
            self._settle()
            self.reached = True
            self._signals.set(f"last/{self._rank}", "1")
            if self._rank == FAULTY_RANK:
                others = [f"last/{rank}" for rank in range(self._world)]
                self._signals.wait(others, datetime.timedelta(seconds=self._timeout))
                os._exit(PEER_DIED)

    def end(self) -> None:
        """Let rank 1 go on, in case this rank has not come to the last collective."""
        self._signals.set(f"last/{self._rank}", "1")
