"""Scenarios of averagers, optimizers and strategies: ranks hash strings differently.

Ranks with odd numbers run in processes with another PYTHONHASHSEED than the others, as no two
ranks of a cluster have the same. A set of names then has another order on them, and so may have a
set of dtypes or classes, which hash by their addresses. Hooks have the scenario ``values_again``.
"""

from dataclasses import replace

from conformance.scenarios import averager, optimizer, strategy
from conformance.scenarios.model import Param, Scenario

# As many elements in other shapes, which hashes may put in any order.
_EQUAL = tuple(Param(shape) for shape in ((2, 12), (3, 8), (4, 6), (24,), (6, 4), (8, 3)))


def _with_other_hashes(plain: Scenario) -> Scenario:
    return replace(
        plain,
        params=(*plain.params, *_EQUAL),
        name=f"{plain.kind}_hash_seeds",
        summary=f"the scenario `{plain.name}`; every other rank has another hash seed",
        world_sizes=(2,),
        hash_seeds_differ=True,
    )


AVERAGER = _with_other_hashes(averager.DTYPES)
OPTIMIZER = _with_other_hashes(optimizer.PLAIN)
STRATEGY = _with_other_hashes(strategy.FORMS)
