"""Wrappers of modules, for activation checkpointing and offloading: called with a module, they return one in its place.

    recomputes      it keeps a block's inputs alone, and runs the block's forward again in the backward
    reentrant       it has the limits that torch documents for use_reentrant=True: tensors in containers get no gradients, nor do
                    parameters of a block none of whose inputs asks for one; under DDP a block that is used twice, and parameters
                    that are not used, need static_graph=True
    draws_anew      what runs again draws other random numbers, as torch documents for preserve_rng_state=False

Without claims it is what the arguments of the target say, if torch's names are among them: checkpoint_impl or use_reentrant, and
preserve_rng_state. Where nothing says that it recomputes, it need not; one that does is held to it that it keeps less.
"""

from collections.abc import Mapping
from typing import Any

from conformance.scenarios.wrapper import (
    ACCUMULATED,
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
from conformance.subjects.kinds._kind import Kind, flag


def _default(arguments: Mapping[str, Any]) -> str:
    named = str(arguments.get("checkpoint_impl", "")).rpartition(".")[2]
    claims = []
    if named in ("REENTRANT", "NO_REENTRANT") or isinstance(arguments.get("use_reentrant"), bool):
        claims.append("recomputes")
    if named == "REENTRANT" or arguments.get("use_reentrant") is True:
        claims.append("reentrant")
    if arguments.get("preserve_rng_state") is False:
        claims.append("draws_anew")
    return ", ".join(claims)


WRAPPER = Kind(
    "wrapper",
    "a wrapper of modules, which takes one and returns one in its place",
    ("19",),
    reference="hooks_ref:checkpoint_wrapper,checkpoint_impl=NO_REENTRANT",
    scenarios=(
        *(PLAIN, RANDOM, CALLS, CONTAINERS, FIRST, STATIC, ACCUMULATED, SUBGROUPS, TWICE, UNUSED, MODES, AUTOCAST, RAISES),
        *(HOOKED, MODULE),
    ),
    claims={"recomputes": flag, "reentrant": flag, "draws_anew": flag},
    default_claims=_default,
    bound=True,
)
