"""Optimizer wrappers: all ranks call ``step()``, which steps parameters together with other ranks.

There are two families. A wrapper that takes an ``averager`` wraps a local optimizer and calls that
averager after each step: ranks have different gradients, and drift apart until they are averaged.
Any other wrapper stands for one optimizer of all ranks, such as a sharded one: all ranks receive
the same gradients, which are averaged already, and hold the parameters of a local optimizer.

The optimizer inside is torch's SGD, or Adam. The averager belongs to the kit, so that every
difference comes from the wrapper.
"""

from collections.abc import Mapping
from typing import Any

from conformance.scenarios.optimizer import (
    ADAM,
    CLOSURE,
    DDP,
    DDP_VIEWS,
    DTYPES,
    GROUPS,
    ORDERED,
    PLAIN,
    RANDOM,
    RELOADED,
    RESUMED,
    SAVED,
    SCHEDULED,
    SUBGROUPS,
    UNEVEN,
    UNUSED,
    ZEROED,
)
from conformance.subjects.kinds._claim import min_world_size, table
from conformance.subjects.kinds._kind import Kind


def _default(arguments: Mapping[str, Any]) -> None:
    return None


OPTIMIZER = Kind(
    "optimizer",
    "an optimizer wrapper, which takes a local optimizer and an averager, or a sharded optimizer",
    ("15",),
    reference="hooks_ref:PostLocalSGDOptimizer",
    scenarios=(
        *(PLAIN, ADAM, RANDOM, GROUPS, SCHEDULED, CLOSURE, ZEROED, UNUSED, DTYPES, SUBGROUPS),
        *(ORDERED, SAVED, RESUMED, RELOADED, DDP, DDP_VIEWS, UNEVEN),
    ),
    claims=table(min_world_size("15.20")),
    default_claims=_default,
)
