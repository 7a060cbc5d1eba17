"""Parameters of optimizer wrappers that are trained only after a state was saved.

A layer is frozen for the first epochs, or a head has had no sample yet: these parameters have no
state in a checkpoint, and the states behind them keep their numbers (torch documentation,
``torch.optim.Optimizer.state_dict``). All numbers are drawn from the session's seed.
"""

import random
from functools import lru_cache

from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import RESUMED, SAVED, SAVED_CLOSED
from conformance.scenarios.optimizer_training import RESUMED_GROUPS, SAVED_GROUPS

_NAMES = {one.name for one in (SAVED, SAVED_CLOSED, RESUMED, SAVED_GROUPS, RESUMED_GROUPS)}
# They are trained some steps after the state was saved.
_LATER = (1, 4)


def is_trained_late(scenario: Scenario, step: int, index: int, *, frozen: bool) -> bool:
    """Whether a parameter is not yet trained in a step, and is frozen until then or is not."""
    if scenario.name not in _NAMES:
        return False
    late = _late(scenario.session_seed, scenario.variant, len(scenario.params))
    after, are_frozen = late
    return step < scenario.resume.saves_at + after and are_frozen.get(index) is frozen


def late_params(scenario: Scenario) -> set[int]:
    """Return the parameters that have had no gradient when the state is saved."""
    step = scenario.resume.saves_at - 1
    return {
        index
        for index in range(len(scenario.params))
        for frozen in (True, False)
        if is_trained_late(scenario, step, index, frozen=frozen)
    }


@lru_cache
def _late(seed: int, variant: str, params: int) -> tuple[int, dict[int, bool]]:
    """Return how many steps after the save they are trained, and whether each is frozen.

    One has others behind it, from the first half; in half of the sessions there is another one.
    """
    draw = random.Random(f"{seed}/{variant}/trained late")
    late = {draw.randrange(params // 2): draw.random() < 0.5}
    if draw.random() < 0.5:
        late.setdefault(draw.randrange(params), draw.random() < 0.5)
    return draw.randint(*_LATER), late
