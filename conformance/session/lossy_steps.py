"""How lossy claims change the steps of scenarios: more of them, and other gradients.

``judging/oracles/lossy`` derives how many steps a requirement takes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from conformance.judging.oracles.lossy import (
    LEFT,
    LEFT_IN_REPEATED,
    LEFT_IN_REWRAPPED,
    LONG_SCENARIOS,
    MIXING_STEPS,
    REPEATED_SCENARIOS,
    TRIALS,
    TRIALS_OF_VALUES,
)
from conformance.scenarios.clusters import UNUSED_GROUPS
from conformance.scenarios.evidence import SPECIAL_FIRST
from conformance.scenarios.hook import BUCKETS, SAVED, STREAMS, VALUES
from conformance.scenarios.impulses import ALONE
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.sparse import SPARSE
from conformance.scenarios.specials import base_kind, place_of
from conformance.scenarios.values import LAYERS
from conformance.subjects.claims import DIFFERENCE, FEEDBACK, UNBIASED, Claims

_SMALL_KINDS = {
    "normal": "small",
    "constant": "small_constant",
    "settling": "small_constant",
    "faint": "small_faint",
}
_SMALL_SPECIALS = {"crafted": "small", "nan": "small_nan", "inf": "small_inf"}
_AFTER_OVERFLOWS = (4, 12)  # ordinary steps after the last overflow, for feedback


def steps_of_values(scenario: Scenario, claims: Claims) -> Scenario:
    """Take the first steps of the scenario ``values``."""
    return replace(scenario, steps=_without_wide(VALUES.steps, claims)[:3])


def drop_wide_steps(scenario: Scenario, claims: Claims) -> Scenario:
    """Drop steps with small values beside large ones."""
    return replace(scenario, steps=_without_wide(scenario.steps, claims))


def _without_wide(steps: Sequence[str], claims: Claims) -> tuple[str, ...]:
    """Return the steps without wide-ranged gradients; random ones first if there is a warm-up.

    After a warm-up the first lossy step must feed values that no narrow dtype holds: crafted values
    may survive compression.
    """
    kept = [kind for kind in steps if kind != "wide"]
    if claims.warmup:
        kept.sort(key=lambda kind: kind != "normal")
    return tuple(kept)


def drop_special_steps(scenario: Scenario, claims: Claims) -> Scenario:
    """Drop the steps with NaN and infinities, and those behind them."""
    kinds = [base_kind(kind) for kind in scenario.steps]
    return replace(scenario, steps=scenario.steps[: kinds.index("nan")])


def begin_with_random_values(scenario: Scenario, claims: Claims) -> Scenario:
    """Begin with a step of random values."""
    return replace(scenario, steps=("normal", *scenario.steps[1:]))


def repeat_for_expectation(scenario: Scenario, claims: Claims) -> Scenario:
    """Repeat steps until an expectation shows."""
    count = TRIALS if scenario.name in LONG_SCENARIOS else len(scenario.steps)
    if scenario.name in (VALUES.name, SPARSE.name):
        count = TRIALS_OF_VALUES
    if scenario.name == LAYERS.name:
        return replace(scenario, steps=(LAYERS.steps[0], *("training_constant",) * count))
    # Rule 21.1 compares the first steps of the two.
    if scenario.name in (BUCKETS.name, STREAMS.name):
        return replace(scenario, steps=("beside",) * count)
    kind = "constant"
    if scenario.name == UNUSED_GROUPS.name:
        # The same parameters rest in all draws: what depends on the others of a bucket adds up.
        kind = _with_rests(kind, scenario)
    return replace(scenario, steps=(kind,) * count)


def _with_rests(kind: str, scenario: Scenario) -> str:
    """Return a kind in which the parameters of a drawn step are left out."""
    return f"{kind}@{generator(scenario, 'rests').randrange(10)}"


def drain_residuals(scenario: Scenario, claims: Claims) -> Scenario:
    """Add steps in which held-back values come out."""
    return replace(scenario, steps=scenario.steps + ("faint",) * _draining_steps(scenario, claims))


def feed_impulse_after_drain(scenario: Scenario, claims: Claims) -> Scenario:
    """Add steps in which held-back values come out, and a step of gradients after them."""
    drain = ("faint",) * _steps_until_drained(claims.delta, LEFT_IN_REPEATED)
    return replace(scenario, steps=(*scenario.steps, *drain, ALONE))


def repeat_until_converged(scenario: Scenario, claims: Claims) -> Scenario:
    """Add steps of the same gradients; ranks of groups leave out the same parameters in them."""
    kind = "training_constant" if scenario.name == LAYERS.name else "settling"
    if scenario.name == UNUSED_GROUPS.name:
        kind = _with_rests(kind, scenario)
    return replace(scenario, steps=scenario.steps + (kind,) * _draining_steps(scenario, claims))


def show_recovery(scenario: Scenario, claims: Claims) -> Scenario:
    """Add steps that show whether results are right again: draws on the same gradients, or steps
    in which residuals come out or estimates converge.

    A hook with feedback may keep or lose what it held back when a step overflowed. In
    ``special_first`` that is small beside the ordinary gradients of the steps after the overflows.
    """
    count = _steps_until_drained(claims.delta, LEFT_IN_REPEATED)
    more = {
        UNBIASED: ("constant",) * TRIALS,
        FEEDBACK: ("faint",) * count,
        DIFFERENCE: ("settling",) * count,
    }
    steps = scenario.steps
    if claims.lossy == FEEDBACK and scenario.name == SPECIAL_FIRST.name:
        ordinary = generator(scenario, "after overflows").randint(*_AFTER_OVERFLOWS)
        small = [
            kind.replace(base_kind(kind), _SMALL_SPECIALS[base_kind(kind)], 1)
            for kind in steps[:-1]
        ]
        steps = (*small, *("normal",) * ordinary)
    return replace(scenario, steps=steps + more.get(claims.lossy, ()))


def put_warm_up_after_overflows(steps: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return the steps of ``special_first`` with those of a warm-up after the first overflows."""
    first = next(at for at, kind in enumerate(steps) if not place_of(kind))
    return (*steps[:first], *(steps[first],) * count, *steps[first:])


def _draining_steps(scenario: Scenario, claims: Claims) -> int:
    left = LEFT_IN_REPEATED if scenario.name in REPEATED_SCENARIOS else LEFT
    if scenario.rewraps:
        left = LEFT_IN_REWRAPPED
    return _steps_until_drained(claims.delta, left)


def watch_mixing(scenario: Scenario, claims: Claims) -> Scenario:
    """Add steps until a rank has heard of all others.

    If a state is saved, there are as many steps after the first one of the processes that load it,
    and three or four ranks, alike for all runs of that state: of two, one partner is all others.
    """
    if scenario.resume.saves_at:
        if not claims.mixes:
            return scenario
        draws = generator(replace(scenario, name=SAVED.name), "ranks that mix")
        size = max(draws.choice((3, 4)), claims.min_world_size)
        more = scenario.resume.saves_at + 1 + MIXING_STEPS - len(scenario.steps)
        steps = scenario.steps + ("normal",) * more
        return replace(scenario, size=size, world_sizes=(), steps=steps)
    more = MIXING_STEPS - len(scenario.steps)
    return replace(scenario, steps=scenario.steps + ("normal",) * more)


def drain_with_faint_gradients(scenario: Scenario, claims: Claims) -> Scenario:
    """Take faint gradients for those that empty residuals."""
    count = _steps_until_drained(claims.delta, LEFT)
    return replace(
        scenario, steps=scenario.steps + ("faint",) * count, rescale_call=claims.rescaled
    )


def shrink_gradients(scenario: Scenario, claims: Claims) -> Scenario:
    """Take smaller gradients of the same kinds."""
    return replace(scenario, steps=tuple(_SMALL_KINDS.get(kind, kind) for kind in scenario.steps))


def _steps_until_drained(delta: float, left: float) -> int:
    """Return the number n of steps after which (1 - delta)**(n / 2) <= left; see
    ``oracles/lossy``.
    """
    return math.ceil(2 * math.log(left) / math.log(1 - delta)) if delta < 1 else 2
