"""New memory for the parameters of an averager, between its averages.

``model.to(dtype)`` gives a parameter another tensor, maybe of another dtype, and
``load_state_dict(assign=True)`` replaces the parameter itself. At each move of the scenario
``averager_moved`` every parameter changes in one of these ways; the ways, and the dtypes, are drawn
from the session's seed. New memory is contiguous.

An averager with a state, such as a moving average, may store it by parameter, and in the dtype that
it has computed from the parameter's first one. Its parameters are not replaced, and get dtypes with
the same dtype of state alone: float32 and narrower.
"""

import random
from dataclasses import replace
from functools import lru_cache

from conformance.scenarios.averager_training import option
from conformance.scenarios.model import Param, Scenario

MEMORY = "memory"
DTYPE = "dtype"
REPLACED = "replaced"

_NARROW = ("float32", "float16", "bfloat16")


def moves(scenario: Scenario) -> tuple[int, ...]:
    """Return the steps before which the parameters get new memory."""
    return tuple(map(int, option(scenario, "moves").split()))


def way(scenario: Scenario, step: int, index: int) -> str:
    """Return the way in which a parameter changes before a step, or '' if it does not."""
    if step not in moves(scenario):
        return ""
    return _ways(scenario, moves(scenario).index(step))[index]


def specs_at(scenario: Scenario, step: int) -> tuple[Param, ...]:
    """Return the parameters of a scenario with the dtypes that they have at a step."""
    if not option(scenario, "moves"):
        return scenario.params
    return _specs_after(scenario, sum(move <= step for move in moves(scenario)))


def _keeps_state(scenario: Scenario) -> bool:
    return option(scenario, "state") == "kept"


@lru_cache(maxsize=16)
def _ways(scenario: Scenario, move: int) -> tuple[str, ...]:
    """Return the ways of all parameters; each way is taken by as many as any other, up to one."""
    ways = (MEMORY, DTYPE) if _keeps_state(scenario) else (MEMORY, DTYPE, REPLACED)
    count = len(scenario.params)
    found = [ways[place % len(ways)] for place in range(count)]
    random.Random(f"{scenario.session_seed}/moved/{move}").shuffle(found)
    return tuple(found)


@lru_cache(maxsize=16)
def _specs_after(scenario: Scenario, count: int) -> tuple[Param, ...]:
    """Return the parameters after a number of moves."""
    if not count:
        return scenario.params
    draw = random.Random(f"{scenario.session_seed}/moved dtypes/{count}")
    dtypes = _NARROW if _keeps_state(scenario) else (*_NARROW, "float64")
    found = []
    pairs = zip(_specs_after(scenario, count - 1), _ways(scenario, count - 1), strict=True)
    for spec, chosen in pairs:
        others = [dtype for dtype in dtypes if dtype != spec.dtype]
        drawn = draw.choice(others)
        found.append(replace(spec, dtype=drawn) if chosen == DTYPE else spec)
    return tuple(found)
