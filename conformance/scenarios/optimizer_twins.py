"""Plans of two optimizers of two models, each with options and parameter groups of its own.

The constructions have different rates, and momentum 1; one group has none, so that SGD stays exact.
Each model has groups that leave out options, one of them added at a drawn step, and a rate that is
written later. Options that two objects share, as in a default argument, reach the wrong one.
"""

from typing import Any

from conformance.scenarios.averager_training import turn
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import Setting
from conformance.scenarios.optimizer_pairs import pair_of
from conformance.scenarios.optimizer_training import TWO, plan_of
from conformance.scenarios.seeds import generator

# Rates are these powers of two.
_EXPONENTS = (-5, -4, -3, -2)
# The first parameter group, the second, and the one that is added.
_MEMBERS = ((0, 3), (1, 2), (4,))


def plan_of_model(scenario: Scenario, model: int) -> Setting:
    """Return the arguments of the optimizer and the averager of a model, drawn if they are."""
    if scenario.variant != TWO.variant:
        return plan_of(scenario)
    shared = generator(scenario, "constructions")
    rates = [2.0**exponent for exponent in shared.sample(_EXPONENTS, 2)]
    # The same group of both, so that the other ones can mix their momenta.
    without_momentum = shared.randrange(2)
    return _groups(scenario, model, rates[model], without_momentum)


def _groups(scenario: Scenario, model: int, rate: float, without_momentum: int) -> Setting:
    """Return a plan of groups: one has options of its own, and the others leave out some or all.

    Args:
        scenario: of two models.
        model: the number of the model.
        rate: that of the construction.
        without_momentum: the number of the group that has all options, and no momentum.
    """
    draw = generator(scenario, f"groups of {model}")

    def other_rate(rate: float) -> float:
        return draw.choice([2.0**other for other in _EXPONENTS if 2.0**other != rate])

    of_all = {"lr": rate, "momentum": 1.0}
    first = [{"lr": other_rate(rate)} if draw.random() < 0.5 else {}]
    first.insert(without_momentum, {"lr": other_rate(rate), "momentum": 0.0})
    # The group that is added leaves out all.
    added: dict[str, float] = {}
    groups = tuple(zip(_MEMBERS, (*first, added), strict=True))
    steps = _steps_of(scenario, model)
    # The gradients of a pair's second step are there before the step begins.
    may_add = [step for step in steps[1:-1] if _is_first(scenario, step)]
    if not may_add:
        return Setting(options=of_all, groups=groups)
    adds_at = draw.choice(may_add)
    changes: dict[int, dict[int, dict[str, Any]]] = {}
    place = draw.randrange(2)
    rate_before = {**of_all, **groups[place][1]}["lr"]
    changes[draw.choice(steps[1:])] = {place: {"lr": other_rate(rate_before)}}
    return Setting(options=of_all, groups=groups, added=(adds_at,), changes=changes)


def _steps_of(scenario: Scenario, model: int) -> list[int]:
    return [step for step in range(len(scenario.steps)) if turn(scenario, step)[0] == model]


def _is_first(scenario: Scenario, step: int) -> bool:
    pair = pair_of(scenario, step)
    return pair is None or pair.first == step
