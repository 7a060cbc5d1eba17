"""Scenarios of averagers, optimizers, strategies, joins and quantized collectives on a cluster.

They are those of section 24 for hooks (``clusters.py``), and their world sizes, nodes and groups
are drawn in the same way. Each of them brings its own ranks, whatever world sizes the profile has.
Wrappers have none: they issue no collectives.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios import averager, cluster_draws, collective, joinable, optimizer, strategy
from conformance.scenarios.clusters import EQUAL_NODES, UNEQUAL_NODES, UNEVEN_GROUPS
from conformance.scenarios.joins_in_training import NUMBERS
from conformance.scenarios.model import Param, Scenario


def _on_unequal_nodes(plain: Scenario, name: str, what: str = "") -> Scenario:
    return replace(
        plain,
        name=name,
        summary=f"{what}{UNEQUAL_NODES.summary}",
        world_sizes=(),
        size=UNEQUAL_NODES.size,
        nodes=UNEQUAL_NODES.nodes,
    )


def _on_equal_nodes(plain: Scenario, name: str, what: str = "") -> Scenario:
    return replace(
        plain,
        name=name,
        summary=f"{what}{EQUAL_NODES.summary}",
        world_sizes=(),
        size=EQUAL_NODES.size,
        nodes=EQUAL_NODES.nodes,
    )


def _on_uneven_groups(plain: Scenario, name: str) -> Scenario:
    return replace(
        plain,
        name=name,
        summary="two disjoint groups, whose ranks have no constant distance; the groups are drawn",
        world_sizes=(),
        groups=UNEVEN_GROUPS.groups,
        nodes=UNEVEN_GROUPS.nodes,
    )


_LARGE = Param((5004,))  # the size is drawn


def _with_large_parameter(plain: Scenario) -> Scenario:
    return replace(plain, params=(*plain.params, _LARGE))


_AVERAGER = _with_large_parameter(averager.PLAIN)
_OPTIMIZER = _with_large_parameter(optimizer.PLAIN)
# DDP divides by the number of ranks before it adds, so that crafted values are exact on powers of
# two alone.
_STRATEGY = _with_large_parameter(strategy.RANDOM)

AVERAGER = (
    _on_unequal_nodes(_AVERAGER, "averager_unequal_nodes"),
    _on_equal_nodes(_AVERAGER, "averager_equal_nodes"),
    _on_uneven_groups(_AVERAGER, "averager_uneven_groups"),
)
OPTIMIZER = (
    _on_unequal_nodes(_OPTIMIZER, "optimizer_unequal_nodes"),
    _on_equal_nodes(_OPTIMIZER, "optimizer_equal_nodes"),
    _on_uneven_groups(_OPTIMIZER, "optimizer_uneven_groups"),
)
STRATEGY = (
    _on_unequal_nodes(_STRATEGY, "strategy_unequal_nodes"),
    _on_equal_nodes(_STRATEGY, "strategy_equal_nodes"),
    _on_uneven_groups(_STRATEGY, "strategy_uneven_groups"),
)
JOINABLE = (
    _on_unequal_nodes(joinable.UNEVEN, "joinable_unequal_nodes", "uneven inputs; "),
    _on_equal_nodes(joinable.UNEVEN, "joinable_equal_nodes", "uneven inputs; "),
    _on_uneven_groups(joinable.UNEVEN, "joinable_uneven_groups"),
)
JOINABLE_NUMBERS = (
    _on_unequal_nodes(NUMBERS, "joinable_numbers_unequal_nodes", "drawn numbers of inputs; "),
    _on_equal_nodes(NUMBERS, "joinable_numbers_equal_nodes", "drawn numbers of inputs; "),
)
COLLECTIVE = (
    _on_unequal_nodes(collective.PLAIN, "collective_unequal_nodes"),
    _on_equal_nodes(collective.PLAIN, "collective_equal_nodes"),
    _on_uneven_groups(collective.PLAIN, "collective_uneven_groups"),
)

ALL = (*AVERAGER, *OPTIMIZER, *STRATEGY, *JOINABLE, *JOINABLE_NUMBERS, *COLLECTIVE)


def _draw(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the same of the hooks' scenario, and the size of a large parameter: 2**12 to 2**15
    elements, every size as likely as its double.
    """
    names = (UNEQUAL_NODES.name, EQUAL_NODES.name, UNEVEN_GROUPS.name)
    name = next(name for name in names if scenario.name.endswith(f"_{name}"))
    scenario = cluster_draws.DRAWS[name](scenario, numbers)
    large = Param((round(2 ** numbers.uniform(12, 15)),))
    params = tuple(large if spec == _LARGE else spec for spec in scenario.params)
    return replace(scenario, params=params)


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    scenario.name: _draw for scenario in ALL
}
