"""Learning rates of the groups of parameters that a sync strategy is given, as data.

A group rests while its rate is 0: layers are unfrozen one after another, and a schedule may end at
0. Its gradients are means like all others: momentum, and Adam's averages, take them in at any rate.
"""

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy import SHARED

# Two optimizers have two groups each.
GROUPS = 4
_LEAST_EXPONENT = -12


def rates(scenario: Scenario, step: int) -> tuple[float, ...]:
    """Return the rates of the groups in a step, of one optimizer after the other.

    In each step one group moves at least. A drawn group rests from the first step on, until a later
    one; another one moves at first, and rests from a drawn step on. The other two rest in drawn
    steps. In one step all groups of one optimizer rest. Rates of groups that move are 1e-12 to 1.

    Returns:
        The rates; () in scenarios in which all rates are 0.
    """
    if scenario.variant != SHARED.variant:
        return ()
    resting = resting_groups(scenario, step)
    draws = generator(scenario, f"rates {step}")
    drawn = [10 ** draws.uniform(_LEAST_EXPONENT, 0) for _ in range(GROUPS)]
    return tuple(0.0 if group in resting else rate for group, rate in enumerate(drawn))


def resting_groups(scenario: Scenario, step: int) -> frozenset[int]:
    """Return the numbers of the groups that rest in a step; see :func:`rates`."""
    draws = generator(scenario, "resting groups")
    late, early, *others = draws.sample(range(GROUPS), GROUPS)
    count = len(scenario.steps)
    late_moves_at = draws.randint(2, count - 2)
    early_rests_at = draws.randint(1, count - 2)
    one_moves_alone_at = draws.randrange(early_rests_at)
    of_step = generator(scenario, f"resting groups {step}")
    resting = {group for group in others if of_step.random() < 0.5}
    if step < late_moves_at:
        resting.add(late)
    if step >= early_rests_at:
        resting.add(early)
    if step == one_moves_alone_at:
        # Groups of one optimizer are neighbours; the group that moves belongs to the other one.
        resting.update(group for group in range(GROUPS) if group // 2 != early // 2)
    if len(resting) == GROUPS:
        resting.discard(others[0])
    return frozenset(resting)
