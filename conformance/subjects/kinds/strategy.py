"""Sync strategies: context managers around the forward and backward of each micro-batch.

After the last micro-batch gradients are averaged. A strategy is called once for each micro-batch,
with those of these arguments that its signature names, and returns a context manager: ``model``
(the DDP module), ``is_final_microbatch``, ``optimizers`` (a list), ``state`` (which has ``model``
and ``optimizers``, as Composer's has), ``process_group``, ``rank``, ``world_size`` and ``device``.
One that counts micro-batches itself, as ``accelerator.accumulate(model)`` of Hugging Face's
accelerate does, claims ``counts(k)``: every step has k of them. If it is a class, one object is
made with the arguments of the target, and called for each micro-batch.

Without claims a strategy is right when micro-batches and ranks use different parameters, with the
default options of DDP. Composer's ``multi_auto_sync``, by its argument, claims find_unused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conformance.scenarios.averager_training import large_twins, many_params, two_large
from conformance.scenarios.conditions_together import STRATEGY as TOGETHER
from conformance.scenarios.failing_collectives import STRATEGY as FAILING
from conformance.scenarios.hash_seeds import STRATEGY as HASH_SEEDS
from conformance.scenarios.kinds_in_clusters import STRATEGY as CLUSTERS
from conformance.scenarios.kinds_under_default_dtypes import STRATEGY as DEFAULT_DTYPES
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.probes_of_kinds import STRATEGY as PROBE
from conformance.scenarios.probes_of_kinds import maker_for
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy import (
    ACCUMULATED,
    COMBINED,
    COUNTED,
    FLAT,
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
from conformance.scenarios.strategy_breaks import RECOVERED_ALIKE, RECOVERED_EARLY
from conformance.scenarios.strategy_dtypes import with_halves
from conformance.scenarios.strategy_passes import BY_FORWARDS
from conformance.scenarios.strategy_schedule import _DIFFERENT, ZEROED, counted
from conformance.scenarios.strategy_training import (
    AFTER_WORLD,
    ALL,
    AUTOCAST,
    EMPTY,
    GRADIENT_DTYPES,
    LARGE,
    LARGE_DTYPES,
    LONG,
    LONG_STEPS,
    PARTS,
    PASSES,
    PENALTIES,
    RECOVERED,
    SPECIAL,
    UNFROZEN,
)
from conformance.scenarios.strategy_uses import LARGE_TWINS, TWO_ALIKE, TWO_MODELS
from conformance.scenarios.tables import prime_from
from conformance.subjects.kinds._claim import (
    Form,
    min_world_size,
    option_claim,
    option_flag,
    table,
)
from conformance.subjects.kinds._kind import Kind

CLAIM = replace(
    MICROBATCHES,
    name="strategy_claim",
    summary="the scenario `strategy_microbatches` with DDP as it is by default",
    world_sizes=(2,),
    variant="claim",
)


# Half of the least and the largest number of steps of these runs.
_MORE_STEPS = {PENALTIES.name: (5, 12), GRADIENT_DTYPES.name: (4, 8)}


def _counts(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if len(args) != 1 or options or args[0] not in ("2", "3", "4"):
        raise ValueError("takes the number of micro-batches of a step, from 2 to 4: counts(4)")
    return {"name": args[0]}


COUNTS = option_claim(
    "counts",
    Form(
        "counts(4)",
        "The strategy counts micro-batches itself; every step has so many.",
        "16.1",
    ),
    read=_counts,
)


def _adapt(scenario: Scenario, claimed: Mapping[str, Mapping[str, Any]]) -> Scenario:
    """Return the scenario as it is run for a subject that makes these claims."""
    if "counts" in claimed:
        scenario = counted(scenario, claimed["counts"]["name"])
    if scenario.variant == "claim":
        return scenario  # it shows that the claims are needed, so it makes no allowance for them
    scenario = with_halves(scenario)
    if scenario.name == AFTER_WORLD.name:
        scenario = _with_a_large_one(scenario)
    if scenario.name == LARGE.name:
        # A parameter of 2**20 to 2**21 elements is the largest.
        scenario = replace(scenario, params=many_params(generator(scenario), 2**20))
        if "all_used" not in claimed:
            twins = large_twins(generator(scenario, "twins"))
            scenario = replace(scenario, params=(*scenario.params, *twins), variant=LARGE_TWINS)
    if scenario.variant == AUTOCAST.variant:
        params = (*scenario.params, *two_large(generator(scenario)))
        scenario = replace(scenario, params=params)
    if scenario.name == LARGE_DTYPES.name:
        draw = generator(scenario)
        wide = [replace(p, dtype=draw.choice(("float32", "float64"))) for p in two_large(draw)]
        scenario = replace(scenario, params=(*wide, *scenario.params))
    if scenario.name == LONG.name:
        number = generator(scenario).randint(*LONG_STEPS)
        scenario = replace(scenario, steps=scenario.steps[:1] * number)
    if scenario.name in _MORE_STEPS:
        # The kinds of steps come in turn, each as often.
        number = generator(scenario).randint(*_MORE_STEPS[scenario.name])
        scenario = replace(scenario, steps=scenario.steps[:2] * number)
    if scenario.variant == SPECIAL.variant:
        *kinds, last = scenario.steps
        generator(scenario).shuffle(kinds)
        scenario = replace(scenario, steps=(*kinds, last))
    if scenario.name == SPECIAL.name:
        numel = prime_from(generator(scenario).randint(2**16, 2**17))
        large = Param((numel,), "float16")
        scenario = replace(scenario, params=(*scenario.params, large))
    # DDP averages by itself under these claims.
    is_ddps_own = "all_used" in claimed or "find_unused" in claimed
    if scenario.variant == EMPTY.variant and is_ddps_own:
        scenario = replace(scenario, variant="two")
    if scenario.variant == PASSES.variant and is_ddps_own:
        # It averages the gradients of the first pass through an output alone.
        scenario = replace(scenario, variant=PARTS.variant)
    if scenario.variant == PENALTIES.variant and (
        "all_used" in claimed or "find_unused" in claimed
    ):
        scenario = replace(scenario, variant=BY_FORWARDS)
    if scenario.variant == RECOVERED.variant and is_ddps_own:
        # A backward of some parameters is none to DDP, if it averages them by itself.
        variant = RECOVERED_ALIKE if "all_used" in claimed else RECOVERED_EARLY
        scenario = replace(scenario, variant=variant)
    if "world_only" in claimed and scenario.groups:
        scenario = replace(scenario, groups=(), twin_groups=(), nodes=(), world_sizes=(2,))
    if "all_used" in claimed and scenario.variant in _DIFFERENT:
        # The variants with as many micro-batches in which all parameters are used.
        variants = {
            MICROBATCHES.variant: "four",
            UNFROZEN.variant: ZEROED,
            TWO_MODELS: TWO_ALIKE,
        }
        variant = variants.get(scenario.variant, "two")
        scenario = replace(scenario, variant=variant)
    if scenario.variant == ZEROED:
        # DDP is as these strategies have it.
        scenario = replace(scenario, ddp=replace(scenario.ddp, find_unused_parameters=False))
    if "find_unused" in claimed:
        scenario = replace(scenario, ddp=replace(scenario.ddp, find_unused_parameters=True))
    return scenario


def _with_a_large_one(scenario: Scenario) -> Scenario:
    """Return a scenario in which a drawn parameter has 2**17 to 2**19 elements."""
    draw = generator(scenario, "large")
    params = list(scenario.params)
    place = draw.randrange(len(params))
    params[place] = replace(params[place], shape=(prime_from(draw.randint(2**17, 2**19)),))
    return replace(scenario, params=tuple(params))


def _default(arguments: Mapping[str, Any]) -> str | None:
    return "find_unused" if arguments.get("sync_strategy") == "multi_auto_sync" else None


STRATEGY = Kind(
    "strategy",
    "a sync strategy, called for each micro-batch with any of model, is_final_microbatch, "
    "optimizers",
    ("16",),
    reference="hooks_ref:ddp_sync_context,sync_strategy=forced_sync",
    scenarios=(
        *(PLAIN, ACCUMULATED, RANDOM, MICROBATCHES, RANKS, VIEWS, COMBINED, SHARED, KEPT, FORMS),
        *(FLAT, SPARSE, SUBGROUPS, ORDERED, RAISES, WITHOUT, NO_DDP, COUNTED, CLAIM),
        *ALL,
        *FAILING,
        *CLUSTERS,
        DEFAULT_DTYPES,
        HASH_SEEDS,
        *TOGETHER,
        PROBE,
    ),
    claims=table(
        option_flag(
            "find_unused",
            "The strategy needs DDP(find_unused_parameters=True); models are made with it.",
            "16.16",
        ),
        option_flag(
            "all_used",
            "The strategy is right if every micro-batch of every rank uses every parameter; other "
            "cases are not judged.",
            "16.16",
        ),
        option_flag(
            "world_only",
            "The strategy takes no process group and always uses WORLD; subgroups are not judged.",
            "16.9",
        ),
        COUNTS,
        min_world_size("16.17"),
    ),
    default_claims=_default,
    probes=maker_for("strategy", "16.37"),
    bound=True,
    adapt=_adapt,
)
