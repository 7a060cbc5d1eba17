"""Calls of an optimizer wrapper with arguments by position or by keyword.

torch.distributed.checkpoint calls ``load_state_dict(state_dict=...)``, Lightning calls
``step(closure=...)``, and torch's examples call ``consolidate_state_dict()`` for the first rank.
"""

from collections import Counter
from typing import Any

from conformance.ranks.drivers._optimizer_use import takes
from conformance.records.recorder import Recorder
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_in_half import HALF
from conformance.scenarios.seeds import generator


class WaysToCall:
    """Calls the methods of optimizers in all of their ways, in turns.

    The first way of each method is drawn from the session's seed, and is another one on the next
    rank. A method whose parameters have other names is called by position, and that is recorded.

    Args:
        scenario: the scenario, with its seed.
        rank: the global rank.
        recorder: of the rank.
    """

    def __init__(self, scenario: Scenario, rank: int, recorder: Recorder) -> None:
        self._scenario = scenario
        self._rank = rank
        self._recorder = recorder
        self._counts: Counter[str] = Counter()

    def load(self, optimizer: Any, state: Any) -> None:
        """Load a state."""
        load = optimizer.load_state_dict
        if self._turn(load, "load_state_dict(state_dict=...)", state_dict=state):
            load(state_dict=state)
        else:
            load(state)

    def step(self, optimizer: Any, closure: Any) -> Any:
        """Step with a closure, and return the result."""
        # 15.9 reads the scenario of half precision, too, and judges no closures.
        may_have_name = self._scenario.variant != HALF.variant
        if may_have_name and self._turn(optimizer.step, "step(closure=...)", closure=closure):
            return optimizer.step(closure=closure)
        return optimizer.step(closure)

    def consolidate(self, optimizer: Any, to: int) -> None:
        """Collect the state on a rank of the group; the first one is the default."""
        collect = optimizer.consolidate_state_dict
        if to == 0 and self._turn(collect, "consolidate_state_dict()"):
            collect()
        elif self._turn(collect, "consolidate_state_dict(to=...)", to=to):
            collect(to=to)
        else:
            collect(to)

    def _turn(self, method: Any, call: str, **kwargs: Any) -> bool:
        """Return whether the next call is this one, which comes in every other turn."""
        if not takes(method, **kwargs):
            self._recorder.event("not_called", call=call)
            return False
        first = generator(self._scenario, f"calls of {call}").randrange(2)
        self._counts[call] += 1
        return bool((first + self._rank + self._counts[call]) % 2)
