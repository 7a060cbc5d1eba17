"""Scenarios for optimizer wrappers: states and options of other forms than numbers and tensors.

Their numbers are drawn from the session's seed.
"""

import random
from dataclasses import replace
from typing import Any

from conformance.scenarios.optimizer import RELOADED, Setting

TENSOR_RATES = replace(
    RELOADED,
    name="optimizer_tensor_rates",
    summary="SGD, whose learning rates are tensors that are filled in place before steps; a group "
    "is added, and before a drawn step everything is restored to an earlier step",
    steps=("normal",) * 10,
    variant="tensor_rates",
)

ALL = (TENSOR_RATES,)

# The first parameter group, the second, and the group that is added.
_GROUPS = ((0, 3), (1, 2), (4,))


def tensor_rates(draw: random.Random) -> Setting:
    """Return the plan of learning rates in tensors.

    In the step after everything was restored no rate is written: the restored one counts.
    """

    def options() -> dict[str, Any]:
        return {"lr": draw.uniform(0.01, 0.1), "momentum": draw.uniform(0.5, 0.95)}

    groups = tuple((indices, options()) for indices in _GROUPS)
    added = draw.randint(1, 2)
    saved = draw.randint(added + 1, 4)
    restored = draw.randint(saved + 2, 7)
    changes = {
        step: {
            place: {"lr": draw.uniform(0.01, 0.1)}
            for place in range(len(groups) if step >= added else len(groups) - 1)
        }
        for step in range(1, len(TENSOR_RATES.steps))
        if step != restored
    }
    return Setting(
        warmup=draw.randint(1, 3),
        options={"lr": 2.0**-3},
        groups=groups,
        added=added,
        changes=changes,
        back=(restored, saved),
        has_tensor_rates=True,
    )
