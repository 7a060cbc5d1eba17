"""TODO: conformance/session/plan.py."""

import math
from dataclasses import replace

from conformance.judging.oracles.lossy import _LONG, _ONE_WORLD, LEFT, TRIALS
from conformance.scenarios.hook import BUCKETS, RAW, SMALL_GRADIENTS, VALUES
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.subjects.claims import DIFFERENCE, FEEDBACK, LOCAL, UNBIASED, Claims
from conformance.subjects.kinds import KINDS

# Matrices that a low rank compresses: (n + m) rank 2 < n m up to rank 6. Of the largest nearly a whole block is left at the end,
# whatever power of two a block has: what becomes of it is seen.
_WIDER = {(5, 3): (24, 32), (3, 5): (24, 32), (6, 5): (32, 24), (4, 3, 2, 5): (24, 3, 2, 5), (20_011,): (91, 225)}


def adapt_scenario(scenario: Scenario, claims: Claims, profile: Profile = GLOO_CPU) -> Scenario:
    """Return the scenario as it is run in a profile for a subject with these claims: longer, with
    matrices that are worth compressing, and without what the claims make meaningless."""
    scenario = replace(scenario, profile=profile)
    scenario = KINDS[scenario.kind].adapt(scenario, claims.options)
    if claims.poststep:
        scenario = replace(scenario, poststep=True, call=claims.call)
    if claims.chained and profile.ordered:
        scenario = replace(
            scenario, observe=replace(scenario.observe, collectives=scenario.observe.collectives or scenario.name == BUCKETS.name)
        )
    elif claims.chained and scenario.name != RAW.name and not scenario.observe.memory:  # which has one bucket, and looks at what is kept
        # A rank that waits for each of its collectives cannot leave the hook before its peers have entered.
        free = scenario.order == "rank0_first"
        recorded = scenario.observe.collectives or scenario.name == BUCKETS.name
        scenario = replace(
            scenario, serialised=True, observe=replace(scenario.observe, collectives=recorded), order="free" if free else scenario.order
        )
    if claims.dtypes and scenario.name != "dtypes":
        params = tuple(spec for spec in scenario.params if spec.dtype in claims.dtypes)
        scenario = replace(scenario, params=params or scenario.params)
    if scenario.simulated and (claims.lossy or claims.fused):
        return replace(scenario, simulated=())
    if scenario.simulated:
        scenario = replace(scenario, simulated=tuple(max(size, claims.min_world_size) for size in scenario.simulated))
    if claims.fused and scenario.params:
        scenario = replace(
            scenario, fused=True, initial_value=0.0, training_loop=False, steps=tuple(kind for kind in scenario.steps if kind != "wide")
        )
    if not claims.lossy or not scenario.params:
        return scenario
    special = "inf" in scenario.steps
    if scenario.name == "sizes":
        scenario = replace(scenario, params=scenario.params[::4])  # no size is exact here: some of them will do
    # After a warm-up the first lossy step feeds what no narrow dtype holds: crafted values may survive compression.
    fed = VALUES.steps if scenario.name == "views" else scenario.steps
    steps = tuple(sorted((kind for kind in fed if kind != "wide"), key=lambda kind: bool(claims.warmup) and kind != "normal"))
    steps = steps[:3] if scenario.name == "views" else steps  # compared with those of `values`
    longer = scenario.name in _LONG
    if claims.warmup and (longer or scenario.delayed) and "normal" not in steps:
        steps = ("normal", *steps[1:])
    if claims.lossy == UNBIASED and not special:
        steps = ("constant",) * (TRIALS if longer else len(steps))
    elif claims.lossy == FEEDBACK and longer:
        steps += ("zero_all",) * _steps_until(claims.delta)
    elif claims.lossy == DIFFERENCE and longer:
        steps += ("constant",) * _steps_until(claims.delta)
    if scenario.name == SMALL_GRADIENTS.name:  # what it was made longer by is as small
        steps = tuple({"normal": "small", "constant": "small_constant"}.get(kind, kind) for kind in steps)
    params = tuple(replace(spec, shape=_WIDER.get(spec.shape, spec.shape)) for spec in scenario.params)
    if scenario.params == VALUES.params:
        params = (params[0], *params)  # two matrices of one shape in a bucket: what is held back of one is not the other's
    return replace(
        scenario,
        world_sizes=(2,) if scenario.name in _ONE_WORLD and longer else scenario.world_sizes,
        params=params,
        steps=("crafted",) * claims.warmup + steps,
        fault=replace(scenario.fault, step=scenario.fault.step + claims.warmup),
        resume=replace(scenario.resume, saves_at=scenario.resume.saves_at and scenario.resume.saves_at + claims.warmup),
        observe=replace(scenario.observe, bytes_sent=claims.lossy == LOCAL and scenario.fault.kind != "none"),
    )


def _steps_until(delta: float) -> int:
    return math.ceil(2 * math.log(LEFT) / math.log(1 - delta)) if delta < 1 else 2
