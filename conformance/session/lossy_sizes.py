"""How lossy claims change the scenarios with sizes as in training: smaller sizes, fewer steps."""

import math
from dataclasses import replace

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.training_sizes import add_large_buckets, draw_smaller
from conformance.subjects.claims import (
    CONTRACTION,
    DIFFERENCE,
    LOCAL,
    UNBIASED,
    Claims,
)

_LEVEL_KINDS = {"normal": "level", "crafted": "level", "constant": "level_constant"}
# Elements of all parameters together, times steps: results of so many are recorded and judged in
# full within some seconds.
_RESULTS = 1 << 25
# A step of 2**24 elements takes long: as few as leave at most this share of the gradients' norm,
# and at most four. A mean that is left out, doubled or not communicated is off by 0.88 or more.
_VAST_LEFT = 0.82
_VAST_STEPS = 4


def fold_by_bucket(scenario: Scenario, claims: Claims) -> Scenario:
    """Fold results by bucket: weights of local results differ from bucket to bucket."""
    return replace(scenario, folded="bucket")


def draw_smaller_sizes(scenario: Scenario, claims: Claims) -> Scenario:
    """Draw sizes whose results are recorded in full over all steps."""
    steps = scenario.steps
    if claims.holds_back:
        steps = tuple(_LEVEL_KINDS.get(kind, kind) for kind in steps)
    most = min(_RESULTS // (len(steps) + claims.warmup), 1 << 22)
    if claims.lossy == UNBIASED:
        most //= 2  # the errors of all draws are judged together
    if claims.lossy == LOCAL:
        most = 1 << 20  # weights are solved for each bucket and step
    scenario = replace(scenario, steps=steps, folded="")
    return draw_smaller(scenario, most, generator(scenario, "smaller"))


def repeat_vast_steps(scenario: Scenario, claims: Claims) -> Scenario:
    """Repeat the step as often as the claim needs."""
    if claims.lossy == LOCAL:
        small = tuple(spec for spec in scenario.params if not spec.exponent)
        return replace(scenario, params=small, folded="bucket")
    return replace(scenario, steps=_heavy_steps(scenario, claims))


def take_moments_of_buckets(scenario: Scenario, claims: Claims) -> Scenario:
    """Record moments of a few heavy steps, which each bucket is judged by."""
    # DDP's first step has one bucket: its residuals are to be small when each parameter gets its
    # own.
    steps = _heavy_steps(scenario, claims)
    faint = steps[0].replace("heavy", "faint")
    if claims.lossy == UNBIASED:
        scenario = add_large_buckets(scenario, generator(scenario, "large"))
    return replace(scenario, steps=(faint, *steps), folded="moments", world_sizes=(2,))


def _heavy_steps(scenario: Scenario, claims: Claims) -> tuple[str, ...]:
    """Return steps after which little is left of most of the mean, which one rank feeds."""
    kind = generator(scenario, "heavy").choice(("heavy_first", "heavy_last"))
    if claims.lossy in (CONTRACTION, UNBIASED):
        return (kind,) * 2
    share = math.sqrt(1 - claims.delta)
    count = next((n for n in range(2, _VAST_STEPS) if share**n <= _VAST_LEFT), _VAST_STEPS)
    later = kind if claims.lossy == DIFFERENCE else "faint"
    return (kind,) + (later,) * (count - 1)
