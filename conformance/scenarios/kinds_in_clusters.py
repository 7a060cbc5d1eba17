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
from conformance.scenarios.model import Observation, Param, Scenario

_CLUSTERS = {
    UNEQUAL_NODES: UNEQUAL_NODES.summary,
    EQUAL_NODES: EQUAL_NODES.summary,
    UNEVEN_GROUPS: "two disjoint groups, whose ranks have no constant distance; the groups are "
    "drawn",
}


def _on(cluster: Scenario, plain: Scenario, prefix: str, what: str = "") -> Scenario:
    """Return a scenario of another kind with the ranks, nodes and groups of the hooks' one."""
    return replace(
        plain,
        name=f"{prefix}_{cluster.name}",
        summary=f"{what}{_CLUSTERS[cluster]}",
        world_sizes=(),
        size=cluster.size,
        nodes=cluster.nodes,
        groups=cluster.groups,
    )


_LARGE = Param((5004,))  # the size is drawn


def _with_large_parameter(plain: Scenario) -> Scenario:
    return replace(plain, params=(*plain.params, _LARGE))


_AVERAGER = _with_large_parameter(averager.PLAIN)
_OPTIMIZER = _with_large_parameter(optimizer.PLAIN)
# DDP divides by the number of ranks before it adds, so that crafted values are exact on powers of
# two alone.
_STRATEGY = _with_large_parameter(strategy.RANDOM)

AVERAGER = tuple(_on(cluster, _AVERAGER, "averager") for cluster in _CLUSTERS)
OPTIMIZER = tuple(_on(cluster, _OPTIMIZER, "optimizer") for cluster in _CLUSTERS)
STRATEGY = tuple(_on(cluster, _STRATEGY, "strategy") for cluster in _CLUSTERS)
JOINABLE = (
    _on(UNEQUAL_NODES, joinable.UNEVEN, "joinable", "uneven inputs; "),
    _on(EQUAL_NODES, joinable.UNEVEN, "joinable", "uneven inputs; "),
    _on(UNEVEN_GROUPS, joinable.UNEVEN, "joinable"),
)
JOINABLE_NUMBERS = tuple(
    _on(cluster, NUMBERS, "joinable_numbers", "drawn numbers of inputs; ")
    for cluster in (UNEQUAL_NODES, EQUAL_NODES)
)
_COLLECTIVE = replace(collective.PLAIN, observe=Observation(bytes_sent=True))
COLLECTIVE = tuple(_on(cluster, _COLLECTIVE, "collective") for cluster in _CLUSTERS)

ALL = (*AVERAGER, *OPTIMIZER, *STRATEGY, *JOINABLE, *JOINABLE_NUMBERS, *COLLECTIVE)


def _draw(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the same of the hooks' scenario, and the size of a large parameter: 2**12 to 2**15
    elements, every size as likely as its double.
    """
    names = (cluster.name for cluster in _CLUSTERS)
    name = next(name for name in names if scenario.name.endswith(f"_{name}"))
    scenario = cluster_draws.DRAWS[name](scenario, numbers)
    large = Param((round(2 ** numbers.uniform(12, 15)),))
    params = tuple(large if spec == _LARGE else spec for spec in scenario.params)
    return replace(scenario, params=params)


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    scenario.name: _draw for scenario in ALL
}
