"""The trainer's calls for the twin in ``two_models``, as data; none is for the model.

Each model of a process has a state of its own. A state that keeps its residuals in its class has
those of the other model rescaled, or replaced, too. Numbers are drawn from the session's seed:

    rescales    under ``rescaled``: the level of the twin's loss scale, 0 to 8, changes before about
                a quarter of the steps. The factors are powers of two, and say nothing of gradients
    a load      under ``checkpointable``: the twin's state is saved before a step, and loaded before
                a later one, if it can be loaded in its own process. Both come before the steps that
                empty residuals: those feed the same gradients, so that residuals soon repeat
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

from conformance.scenarios.model import DRAINING, Scenario
from conformance.scenarios.seeds import generator

LEVELS = 8
SHARE = 0.25
LOADS = "loads_twin"


@dataclass(frozen=True)
class CallsForTwin:
    """The calls.

    Attributes:
        factors: the factor of the loss scale, by the step before which it changes.
        saves_at: the step before which the twin's state is saved; -1 for never.
        loads_at: the step before which it is loaded; -1 for never.
    """

    factors: dict[int, float] = field(default_factory=dict)
    saves_at: int = -1
    loads_at: int = -1


def with_calls_for_twin(scenario: Scenario, rescale_call: str, *, loads: bool) -> Scenario:
    """Return a scenario in which the trainer makes calls for the twin."""
    options = (*scenario.options, LOADS) if loads else scenario.options
    return replace(scenario, rescale_call=rescale_call, options=options)


@lru_cache(maxsize=16)
def calls_for_twin(scenario: Scenario) -> CallsForTwin:
    """Return the calls of a run."""
    if scenario.joint or scenario.twin_groups:
        return CallsForTwin()
    draws = generator(scenario, "calls for the twin")
    count = len(scenario.steps)
    factors: dict[int, float] = {}
    level = 0
    for step in range(1, count):
        if draws.random() < SHARE:
            other = draws.choice([one for one in range(LEVELS + 1) if one != level])
            factors[step] = 2.0 ** (other - level)
            level = other
    if not scenario.rescale_call:
        factors = {}
    before_drain = sum(kind not in DRAINING for kind in scenario.steps)
    if LOADS not in scenario.options or before_drain < 3:
        return CallsForTwin(factors)
    saves_at = draws.randrange(1, before_drain - 1)
    return CallsForTwin(factors, saves_at, draws.randrange(saves_at + 1, before_drain))
