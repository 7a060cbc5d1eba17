"""Steps of a long run after which gradients are zeroed in place, as data.

Scripts call ``zero_grad()``, which frees the gradients, or ``zero_grad(set_to_none=False)``, which
leaves zeros in the same memory. A hook that keeps a parameter's .grad itself, and no copy of it,
then has zeros, and later the gradients of other steps. Both ways come in turns; the steps are drawn
from the session's seed:

    first turn   in place, from the first step on to 20 to 60 steps after the warm-up, because a
                 state takes its first values then
    other turns  20 to 120 steps
"""

from functools import lru_cache

from conformance.scenarios.feed import feed_of
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

STEPS_OF_FIRST = (20, 60)
STEPS_OF_OTHERS = (20, 120)


def zeroes_in_place(scenario: Scenario, step: int) -> bool:
    """Whether the gradients of a step of a long run are zeroed, instead of freed."""
    return bool(scenario.long_run) and step in _steps(scenario)


@lru_cache(maxsize=16)
def _steps(scenario: Scenario) -> frozenset[int]:
    draws = generator(scenario, "kept gradients")
    steps = feed_of(scenario).steps
    begin = 0
    end = scenario.long_run.warm_up + draws.randint(*STEPS_OF_FIRST)
    kept: list[int] = []
    while begin < steps:
        kept += range(begin, end)
        begin = end + draws.randint(*STEPS_OF_OTHERS)
        end = begin + draws.randint(*STEPS_OF_OTHERS)
    return frozenset(kept)
