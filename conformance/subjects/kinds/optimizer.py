"""Optimizer wrappers: all ranks call ``step()``, which steps parameters together with other ranks.

There are three families. A wrapper that takes an ``averager`` wraps a local optimizer and calls
that averager after each step: ranks have different gradients, and drift apart until they are
averaged. Any other wrapper stands for one optimizer of all ranks. If it claims ``averages``, ranks
have different gradients, and it steps with their mean. Otherwise, as a sharded optimizer under DDP,
all ranks receive the same gradients, which are averaged already; the certificate names that limit.

The optimizer inside is torch's SGD, Adam, AdamW or Adagrad, or one as users write them. The
averager belongs to the kit, so that every difference comes from the wrapper.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conformance.scenarios.averager_training import (
    LONG_STEPS,
    many_params,
    on_one_group,
    on_two_groups,
    with_option,
)
from conformance.scenarios.conditions_together import OPTIMIZER as TOGETHER
from conformance.scenarios.conditions_together import is_long
from conformance.scenarios.failing_collectives import OPTIMIZER as FAILING
from conformance.scenarios.failing_collectives import OPTIMIZER_WITH_CLOSURES
from conformance.scenarios.hash_seeds import OPTIMIZER as HASH_SEEDS
from conformance.scenarios.kinds_in_clusters import OPTIMIZER as CLUSTERS
from conformance.scenarios.kinds_under_default_dtypes import OPTIMIZER as DEFAULT_DTYPES
from conformance.scenarios.model import Param, Scenario
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
    SAVED_CLOSED,
    SCHEDULED,
    SUBGROUPS,
    UNEVEN,
    UNUSED,
    ZEROED,
)
from conformance.scenarios.optimizer_backwards import ALL as OF_BACKWARDS
from conformance.scenarios.optimizer_clipping import CLIPPED
from conformance.scenarios.optimizer_closures import CLOSURE_IN_PARTS
from conformance.scenarios.optimizer_in_half import HALF
from conformance.scenarios.optimizer_loops import ALL as OF_LOOPS
from conformance.scenarios.optimizer_repeats import ALL as REPEATED
from conformance.scenarios.optimizer_rests import ALL as OF_RESTS
from conformance.scenarios.optimizer_states import ALL as OF_STATES
from conformance.scenarios.optimizer_training import (
    ALL,
    LARGE,
    LONG,
    MANY_GROUPS,
    SAVED_GROUPS,
    SPECIAL,
    TWO,
    TWO_GROUPS,
    plan_of,
    with_dtypes,
)
from conformance.scenarios.probes_of_kinds import OPTIMIZER as PROBE
from conformance.scenarios.probes_of_kinds import maker_for
from conformance.scenarios.seeds import generator
from conformance.subjects.kinds._claim import min_world_size, option_flag, table
from conformance.subjects.kinds._kind import Kind


def _default(arguments: Mapping[str, Any]) -> None:
    return None


def _adapt(scenario: Scenario, options: Mapping[str, Any]) -> Scenario:
    """Return a scenario with its drawn numbers, as it is run for these claims."""
    if "averages" in options:
        scenario = with_option(scenario, "averages", "gradients")
    if "world_only" in options and scenario.groups:
        scenario = replace(scenario, groups=(), nodes=(), world_sizes=(2,))
    if scenario.is_probe:
        return scenario
    match scenario.variant:
        case LARGE.variant:
            # A parameter of 2**20 to 2**21 elements is the largest.
            return replace(scenario, params=many_params(generator(scenario), 2**20))
        case MANY_GROUPS.variant:
            draw = generator(scenario, "params")
            shapes = [(draw.randint(1, 9),) for _ in range(draw.randint(48, 80))]
            return replace(scenario, params=tuple(map(Param, shapes)))
        case LONG.variant if not is_long(scenario):
            number = generator(scenario).randint(*LONG_STEPS)
            return replace(scenario, steps=scenario.steps[:1] * number)
        case SPECIAL.variant:
            kinds = list(scenario.steps)
            generator(scenario).shuffle(kinds)
            first = kinds.index("nan")
            second = kinds.index("inf")
            if first < second:
                # NaN would hide the infinities that follow at the same elements.
                kinds[first] = "inf"
                kinds[second] = "nan"
            scenario = replace(scenario, steps=(*kinds, "crafted"))
            return with_dtypes(scenario) if "averages" in options else scenario
        case TWO.variant:
            # Each model has half of the steps, in a drawn order.
            half = len(scenario.steps) // 2
            order = ["0"] * half + ["1"] * half
            generator(scenario).shuffle(order)
            scenario = with_option(scenario, "turns", "".join(order))
            if scenario.name != TWO_GROUPS.name:
                return scenario
            if "world_only" in options:
                return on_one_group(scenario, scenario.size)
            return on_two_groups(scenario, generator(scenario, "groups"))
        case SAVED_GROUPS.variant:
            plan = plan_of(scenario)
            # Numbers of parameters may be kept from a state before the added group.
            resume = replace(scenario.resume, saves_at=plan.saves_at, also_taken_at=min(plan.added))
            return replace(scenario, resume=resume)
    return scenario


OPTIMIZER = Kind(
    "optimizer",
    "an optimizer wrapper, which takes a local optimizer and an averager, or a sharded optimizer",
    ("15",),
    reference="hooks_ref:PostLocalSGDOptimizer",
    scenarios=(
        *(PLAIN, ADAM, RANDOM, GROUPS, SCHEDULED, CLOSURE, ZEROED, UNUSED, DTYPES, SUBGROUPS),
        *(ORDERED, SAVED, SAVED_CLOSED, RESUMED, RELOADED, DDP, DDP_VIEWS, UNEVEN),
        CLOSURE_IN_PARTS,
        *ALL,
        *OF_STATES,
        *OF_LOOPS,
        *OF_BACKWARDS,
        *(CLIPPED, HALF),
        *REPEATED,
        *OF_RESTS,
        *FAILING,
        *CLUSTERS,
        DEFAULT_DTYPES,
        HASH_SEEDS,
        *OPTIMIZER_WITH_CLOSURES,
        *TOGETHER,
        PROBE,
    ),
    claims=table(
        option_flag(
            "averages",
            "The optimizer averages gradients over the group; every rank feeds its own.",
            "15.1, 15.21, 15.43",
        ),
        option_flag(
            "world_only",
            "The optimizer takes no process group and always uses WORLD; subgroups are not judged.",
            "15.10, 15.28",
        ),
        min_world_size("15.20"),
    ),
    default_claims=_default,
    probes=maker_for("optimizer", "15.40"),
    adapt=_adapt,
)
