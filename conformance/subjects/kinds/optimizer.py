"""Optimizer wrappers: what has ``step()``, called by all ranks, and steps parameters with more than one rank's doing.

There are two families. What takes an ``averager`` wraps a local optimizer and asks that averager after each step: ranks have
gradients of their own, and drift apart until they are averaged. Anything else stands for one optimizer of all ranks, such as a
sharded one: ranks are fed the same gradients, averaged already, and hold what a local optimizer would make of them.

The optimizer inside is torch's SGD, or Adam. The averager is the kit's own: so whatever differs is the wrapper's doing.
"""

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
from conformance.subjects.kinds._kind import Kind

OPTIMIZER = Kind(
    "optimizer",
    "an optimizer wrapper: what takes a local optimizer and an averager, or a sharded optimizer",
    ("15",),
    reference="hooks_ref:PostLocalSGDOptimizer",
    scenarios=(
        *(PLAIN, ADAM, RANDOM, GROUPS, SCHEDULED, CLOSURE, ZEROED, UNUSED, DTYPES, SUBGROUPS, ORDERED, SAVED, RESUMED, RELOADED),
        *(DDP, DDP_VIEWS, UNEVEN),
    ),
    claims={},
    default_claims=lambda arguments: "",
)
