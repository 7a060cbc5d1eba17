"""The gradients of a long run, for the ranks that feed them and for the rules that judge."""

from dataclasses import dataclass
from functools import lru_cache

from conformance.scenarios.gradients import REPEATED
from conformance.scenarios.growth import GROWN
from conformance.scenarios.model import LongRun, Scenario
from conformance.scenarios.turns import TURN

Key = tuple[str, int]
"""The kind of a gradient, and the number of the step that its values are computed for."""


@dataclass(frozen=True)
class Feed:
    """The gradients of a long run, round by round.

    Attributes:
        keys: the different gradients.
        places: for each round, the place of its gradient in ``keys``.
        first_steps: for each round, the number of its first step; then the number of all steps.
    """

    keys: tuple[Key, ...]
    places: tuple[int, ...]
    first_steps: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return len(self.places)

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return self.first_steps[-1]

    def steps_of(self, number: int) -> range:
        """Return the steps of a round."""
        return range(self.first_steps[number], self.first_steps[number + 1])


@lru_cache(maxsize=16)
def feed_of(scenario: Scenario) -> Feed:
    """Return the gradients of a long run."""
    long_run = scenario.long_run
    places: dict[Key, int] = {}
    first_steps = [0]
    by_round = []
    for number, kind in enumerate(scenario.steps):
        key = (kind, _number_of_values(kind, number, long_run))
        by_round.append(places.setdefault(key, len(places)))
        is_warm_up = number < long_run.warm_up
        first_steps.append(first_steps[-1] + (1 if is_warm_up else long_run.steps_per_round))
    return Feed(tuple(places), tuple(by_round), tuple(first_steps))


def _number_of_values(kind: str, number: int, long_run: LongRun) -> int:
    if kind in REPEATED or kind in ("zero_all", "minus_zero") or kind.startswith((TURN, GROWN)):
        return 0
    if number < long_run.warm_up:
        return number % long_run.period
    return (number - long_run.warm_up) // long_run.hold % long_run.period
