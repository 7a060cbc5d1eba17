"""Wrappers of modules, for activation checkpointing and offloading.

A wrapper is called with a module and returns a module in its place. Claims follow from the
arguments of the target if torch's names are among them: checkpoint_impl or use_reentrant, and
preserve_rng_state. A wrapper that does not claim ``recomputes`` may recompute; if it does, it has
to keep less in memory.
"""

from collections.abc import Mapping
from typing import Any

from conformance.scenarios.conditions_together import WRAPPER as TOGETHER
from conformance.scenarios.kinds_under_default_dtypes import WRAPPER as DEFAULT_DTYPES
from conformance.scenarios.probes_of_kinds import WRAPPER as PROBE
from conformance.scenarios.probes_of_kinds import maker_for
from conformance.scenarios.wrapper import (
    ACCUMULATED,
    ATTRIBUTES,
    AUTOCAST,
    CALLS,
    CONTAINERS,
    FIRST,
    HOOKED,
    MODES,
    MODULE,
    PLAIN,
    RAISES,
    RANDOM,
    STATIC,
    SUBGROUPS,
    TWICE,
    UNUSED,
)
from conformance.scenarios.wrapper_parts import SCENARIOS as OF_PARTS
from conformance.scenarios.wrapper_training import SCENARIOS as IN_TRAINING
from conformance.subjects.kinds._claim import min_world_size, option_flag, table
from conformance.subjects.kinds._kind import Kind


def _default(arguments: Mapping[str, Any]) -> str | None:
    # torch's enum may be written with its class, as CheckpointImpl.REENTRANT.
    variant = str(arguments.get("checkpoint_impl", "")).rpartition(".")[2]
    reentrant = arguments.get("use_reentrant")
    claims = []
    if variant in ("REENTRANT", "NO_REENTRANT") or isinstance(reentrant, bool):
        claims.append("recomputes")
    if variant == "REENTRANT" or reentrant is True:
        claims.append("reentrant")
    if arguments.get("preserve_rng_state") is False:
        claims.append("draws_anew")
    return ", ".join(claims) or None


WRAPPER = Kind(
    "wrapper",
    "a wrapper of modules, which takes one and returns one in its place",
    ("19",),
    reference="hooks_ref:checkpoint_wrapper,checkpoint_impl=NO_REENTRANT",
    scenarios=(
        *(
            PLAIN,
            RANDOM,
            CALLS,
            CONTAINERS,
            ATTRIBUTES,
            FIRST,
            STATIC,
            ACCUMULATED,
            SUBGROUPS,
            TWICE,
            UNUSED,
        ),
        *(MODES, AUTOCAST, RAISES, HOOKED, MODULE),
        *IN_TRAINING,
        *OF_PARTS,
        DEFAULT_DTYPES,
        *TOGETHER,
        PROBE,
    ),
    claims=table(
        option_flag(
            "recomputes",
            "The wrapper keeps a block's inputs alone, and runs the block's forward again in the "
            "backward.",
            "19.17",
        ),
        option_flag(
            "reentrant",
            "The wrapper has the limits that torch documents for use_reentrant=True: there are no "
            "gradients for tensors in containers, nor for parameters of a block if none of its "
            "inputs requires a gradient; under DDP, blocks that are used twice and parameters "
            "that are not used need static_graph=True.",
            "19.18 in place of 19.5, 19.6, 19.8, 19.39",
        ),
        option_flag(
            "draws_anew",
            "The recomputation draws other random numbers, and new ones in each step, as torch "
            "documents for preserve_rng_state=False.",
            "19.18; outputs alone: 19.2, 19.25, 19.33, 19.40 with dropout",
        ),
        min_world_size(),
    ),
    default_claims=_default,
    probes=maker_for("wrapper", "19.38"),
    bound=True,
)
