"""Scenarios of all kinds but hooks and joinables: torch's default dtype is float64, float16 and
bfloat16; and of collectives under autocast.

Joinables have none: they bring models and inputs of their own, which follow the default dtype.

The order of the three is drawn. Three ranks run where the kind needs ranks at all, since a half has
no error in any dtype, and a third has one.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios import averager, collective, optimizer, strategy
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.wrapper_training import SINGLE

_DTYPES = ("float64", "float16", "bfloat16")
_LARGE = Param((20_011,))  # the size is drawn


def _under_default_dtypes(plain: Scenario, *more: Param) -> Scenario:
    return replace(
        plain,
        params=(*plain.params, *more),
        name=f"{plain.kind}_default_dtypes",
        summary=f"the scenario `{plain.name}`; torch's default dtype is float64, float16 and "
        "bfloat16, one after another, in an order that is drawn",
        world_sizes=(3,),
        default_dtypes=_DTYPES,
    )


AVERAGER = _under_default_dtypes(averager.RANDOM, _LARGE)
OPTIMIZER = _under_default_dtypes(optimizer.RANDOM, _LARGE)
STRATEGY = _under_default_dtypes(strategy.RANDOM, _LARGE)
COLLECTIVE = _under_default_dtypes(collective.PLAIN)
WRAPPER = replace(_under_default_dtypes(SINGLE), world_sizes=(2,))

# Calls in a forward under autocast, as of experts.
COLLECTIVE_UNDER_AUTOCAST = replace(
    COLLECTIVE,
    name="collective_autocast",
    summary="calls under autocast, to float16 and bfloat16 in turns",
    default_dtypes=(),
    variant="autocast",
    options=("autocast=float16/bfloat16",),
)

_OF_DEFAULT_DTYPES = (AVERAGER, OPTIMIZER, STRATEGY, COLLECTIVE, WRAPPER)
ALL = (*_OF_DEFAULT_DTYPES, COLLECTIVE_UNDER_AUTOCAST)


def _draw(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the order of the dtypes, and the size of the large parameter: 2**10 to 2**17 elements,
    every size as likely as its double.
    """
    large = Param((round(2 ** numbers.uniform(10, 17)),))
    params = tuple(large if spec == _LARGE else spec for spec in scenario.params)
    dtypes = tuple(numbers.sample(_DTYPES, len(_DTYPES)))
    return replace(scenario, params=params, default_dtypes=dtypes)


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    scenario.name: _draw for scenario in _OF_DEFAULT_DTYPES
}
