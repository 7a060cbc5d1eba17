"""Plans of two optimizers of two models, each with options and parameter groups of its own.

The constructions have different rates, and the momenta 0 or 1, so that SGD stays exact. Each model
has groups that leave out options, one of them added at a drawn step, and a rate that is written
later. Options that two objects share, such as those in a default argument, reach the wrong one.
"""

import random
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
    constructions = _constructions(generator(scenario, "constructions"))
    return _groups(scenario, model, constructions[model])


def _constructions(draw: random.Random) -> list[dict[str, float]]:
    """Return the options of both constructions, with different rates."""
    rates = draw.sample(_EXPONENTS, 2)
    return [{"lr": 2.0**rate, "momentum": float(draw.randrange(2))} for rate in rates]


def _groups(scenario: Scenario, model: int, of_all: dict[str, float]) -> Setting:
    """Return a plan of groups: the added one leaves out the rate at least, and one more group
    leaves out one option or both.
    """
    draw = generator(scenario, f"groups of {model}")

    def other_rate(rate: float) -> float:
        return draw.choice([2.0**other for other in _EXPONENTS if 2.0**other != rate])

    def own() -> dict[str, float]:
        return {"lr": other_rate(of_all["lr"]), "momentum": 1 - of_all["momentum"]}

    def part() -> dict[str, float]:
        """Return the options of a group: none, or one of the two."""
        names = draw.choice(([], ["lr"], ["momentum"]))
        return {name: value for name, value in own().items() if name in names}

    first = [part(), own()]
    draw.shuffle(first)
    added = {"momentum": 1 - of_all["momentum"]} if draw.random() < 0.5 else {}
    groups = tuple(zip(_MEMBERS, (*first, added), strict=True))
    steps = _steps_of(scenario, model)
    # The gradients of a pair's second step are there before the step begins.
    may_add = [step for step in steps[1:-1] if _is_first(scenario, step)]
    if not may_add:
        return Setting(options=of_all, groups=groups)
    adds_at = draw.choice(may_add)
    changes: dict[int, dict[int, dict[str, Any]]] = {}
    place = draw.randrange(2)
    rate = {**of_all, **groups[place][1]}["lr"]
    changes[draw.choice(steps[1:])] = {place: {"lr": other_rate(rate)}}
    return Setting(options=of_all, groups=groups, added=(adds_at,), changes=changes)


def _steps_of(scenario: Scenario, model: int) -> list[int]:
    return [step for step in range(len(scenario.steps)) if turn(scenario, step)[0] == model]


def _is_first(scenario: Scenario, step: int) -> bool:
    pair = pair_of(scenario, step)
    return pair is None or pair.first == step
