"""Calls of an optimizer wrapper with arguments by position or by keyword.

torch.distributed.checkpoint calls ``load_state_dict(state_dict=...)``, Lightning calls
``step(closure=...)``, and torch's examples call ``consolidate_state_dict()`` for the first rank.
"""

from collections import Counter
from typing import Any

from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_in_half import HALF
from conformance.scenarios.seeds import generator


class WaysToCall:
    """Calls the methods of optimizers in all of their ways, in turns.

    The first way of each method is drawn from the session's seed, and is another one on the next
    rank.

    Args:
        scenario: the scenario, with its seed.
        rank: the global rank.
    """

    def __init__(self, scenario: Scenario, rank: int) -> None:
        self._scenario = scenario
        self._rank = rank
        self._counts: Counter[str] = Counter()

    def load(self, optimizer: Any, state: Any) -> None:
        """Load a state."""
        if self._turn("load_state_dict", 2):
            optimizer.load_state_dict(state_dict=state)
        else:
            optimizer.load_state_dict(state)

    def step(self, optimizer: Any, closure: Any) -> Any:
        """Step with a closure, and return the result."""
        # An error in that scenario would fail 15.9, which judges no closures.
        if self._scenario.variant != HALF.variant and self._turn("step", 2):
            return optimizer.step(closure=closure)
        return optimizer.step(closure)

    def consolidate(self, optimizer: Any, to: int) -> None:
        """Collect the state on a rank of the group; the first one is the default."""
        turn = self._turn(f"consolidate_state_dict {to}", 2 if to else 3)
        if turn == 2:
            optimizer.consolidate_state_dict()
        elif turn:
            optimizer.consolidate_state_dict(to=to)
        else:
            optimizer.consolidate_state_dict(to)

    def _turn(self, name: str, ways: int) -> int:
        """Return the way of the next call of a method."""
        first = generator(self._scenario, f"calls of {name}").randrange(ways)
        self._counts[name] += 1
        return (first + self._rank + self._counts[name] - 1) % ways
