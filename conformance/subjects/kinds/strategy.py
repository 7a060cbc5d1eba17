"""Sync strategies: a context manager around forward and backward of each micro-batch, after whose last one gradients are averaged.

It is called once for each micro-batch with what its signature names of ``model`` (the DDP module), ``is_final_microbatch``,
``optimizers`` (a list), ``state`` (which has ``model`` and ``optimizers``, as Composer's), ``process_group``, ``rank``,
``world_size`` and ``device``; and returns a context manager.

    find_unused     it needs DDP(find_unused_parameters=True), and models are made so
    all_used        it is right where every micro-batch of every rank uses every parameter, and nothing is asked of it elsewhere

Without claims it is right when micro-batches and ranks use different parameters, with DDP as it is by default. Composer's
``multi_auto_sync``, by its argument, is find_unused.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from conformance.scenarios.model import Scenario
from conformance.scenarios.strategy import (
    _DIFFERENT,
    ACCUMULATED,
    COMBINED,
    COUNTED,
    FORMS,
    KEPT,
    MICROBATCHES,
    NO_DDP,
    ORDERED,
    PLAIN,
    RAISES,
    RANDOM,
    RANKS,
    SHARED,
    SPARSE,
    SUBGROUPS,
    VIEWS,
    WITHOUT,
)
from conformance.subjects.kinds._kind import Kind, flag

CLAIM = replace(MICROBATCHES, name="strategy_claim", summary="the same with DDP as it is by default", world_sizes=(2,), variant="claim")


def _under(scenario: Scenario, said: Collection[str]) -> Scenario:
    """Return the scenario as it is run for a subject that says this."""
    if scenario.variant == "claim":
        return scenario
    if "all_used" in said and scenario.variant in _DIFFERENT:
        scenario = replace(scenario, variant="four" if scenario.variant == "microbatches" else "two")
    return replace(scenario, ddp=replace(scenario.ddp, find_unused_parameters=True)) if "find_unused" in said else scenario


def _default(arguments: Mapping[str, Any]) -> str:
    return "find_unused" if arguments.get("sync_strategy") == "multi_auto_sync" else ""


STRATEGY = Kind(
    "strategy",
    "a sync strategy, called for each micro-batch with any of model, is_final_microbatch, optimizers",
    ("16",),
    reference="hooks_ref:ddp_sync_context,sync_strategy=forced_sync",
    scenarios=(
        *(PLAIN, ACCUMULATED, RANDOM, MICROBATCHES, RANKS, VIEWS, COMBINED, SHARED, KEPT, FORMS, SPARSE, SUBGROUPS, ORDERED),
        *(RAISES, WITHOUT, NO_DDP, COUNTED, CLAIM),
    ),
    claims={"find_unused": flag, "all_used": flag},
    default_claims=_default,
    bound=True,
    adapt=_under,
)
