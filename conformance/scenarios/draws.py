"""Sizes, counts, step numbers and scales that are drawn from the session's seed.

A subject can be wrong beyond any threshold: a number of elements, of buckets or of steps. A fixed
scenario has fixed numbers, and a threshold can lie beyond all of them. The scenarios named here are
therefore drawn, from the session's seed (``--seed``) and the scenario's name alone: the same seed
gives the same scenario on every machine. The docstring of each function names the ranges that it
draws from, and so do the rules that read the scenario.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios import (
    cluster_draws,
    collective_conditions,
    collective_training,
    conditions_together,
    evidence,
    failing_collectives,
    joins_in_loops,
    joins_in_training,
    kinds_in_clusters,
    kinds_under_default_dtypes,
    late_steps,
    later_failures,
    micro_batches,
    optimizer_backwards,
    optimizer_clipping,
    optimizer_in_half,
    optimizer_loops,
    optimizer_repeats,
    process,
    reused_states,
    sparse,
    surroundings,
    training_sizes,
    wrapper_training,
)
from conformance.scenarios.dust import OF_DUST, draw_dust
from conformance.scenarios.long_runs import ENDURANCE, draw_endurance
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.values import (
    LAYERS,
    MIDDLE_SIZES,
    RANGES,
    draw_layers,
    draw_middle_sizes,
    draw_ranges,
)

Draw = Callable[[Scenario, random.Random], Scenario]

DRAWS: Mapping[str, Draw] = {
    **cluster_draws.DRAWS,
    **collective_training.DRAWS,
    **collective_conditions.DRAWS,
    **conditions_together.DRAWS,
    **evidence.DRAWS,
    **failing_collectives.DRAWS,
    **joins_in_loops.DRAWS,
    **joins_in_training.DRAWS,
    **kinds_in_clusters.DRAWS,
    **kinds_under_default_dtypes.DRAWS,
    **late_steps.DRAWS,
    **later_failures.DRAWS,
    **micro_batches.DRAWS,
    **optimizer_backwards.DRAWS,
    **optimizer_clipping.DRAWS,
    **optimizer_in_half.DRAWS,
    **optimizer_loops.DRAWS,
    **optimizer_repeats.DRAWS,
    **process.DRAWS,
    **reused_states.DRAWS,
    **sparse.DRAWS,
    **surroundings.DRAWS,
    **training_sizes.DRAWS,
    **wrapper_training.DRAWS,
    ENDURANCE.name: draw_endurance,
    OF_DUST.name: draw_dust,
    LAYERS.name: draw_layers,
    MIDDLE_SIZES.name: draw_middle_sizes,
    RANGES.name: draw_ranges,
}

LARGEST_SEED = 2**32 - 1


def drawn(scenario: Scenario, seed: int) -> Scenario:
    """Return a scenario with the numbers that a session's seed gives it."""
    scenario = replace(scenario, session_seed=seed)
    draw = DRAWS.get(scenario.name)
    return draw(scenario, generator(scenario)) if draw else scenario
