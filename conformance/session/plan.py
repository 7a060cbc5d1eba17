"""The plan: which scenarios a rule reads, at which world sizes, and how the claims change them.

A scenario is written for a hook that is exact. ``adapt_scenario`` makes it right for the claims of
the subject at hand, by a list of adaptations. Each has a condition and a reason, and they are
applied in their order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from conformance.judging.oracles.lossy import LEFT, LONG_SCENARIOS, ONE_WORLD_SCENARIOS, TRIALS
from conformance.judging.rule import Rule, WorldSizes
from conformance.scenarios.hook import (
    AT_SCALE,
    BUCKETS,
    DTYPES,
    RAW,
    SIZES,
    SMALL_GRADIENTS,
    VALUES,
    VIEWS,
)
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.subjects.claims import DIFFERENCE, FEEDBACK, LOCAL, UNBIASED, Claims
from conformance.subjects.kinds import KINDS

# Shapes that a low rank compresses: (n + m) rank 2 < n m up to rank 6. Of the largest shape nearly
# a whole block is left at the end, whatever power of two a block has, so that a dropped tail shows.
_WIDER_SHAPES = {
    (5, 3): (24, 32),
    (3, 5): (24, 32),
    (6, 5): (32, 24),
    (4, 3, 2, 5): (24, 3, 2, 5),
    (20_011,): (91, 225),
}
_SMALL_KINDS = {"normal": "small", "constant": "small_constant"}


@dataclass(frozen=True)
class Adaptation:
    """One change of a scenario.

    Attributes:
        applies: the condition.
        change: returns the changed scenario.
        reason: why.
    """

    applies: Callable[[Scenario, Claims], bool]
    change: Callable[[Scenario, Claims], Scenario]
    reason: str


def adapt_scenario(scenario: Scenario, claims: Claims, profile: Profile = GLOO_CPU) -> Scenario:
    """Return the scenario as it runs in a profile for a subject with these claims."""
    scenario = replace(scenario, profile=profile)
    scenario = KINDS[scenario.kind].adapt(scenario, claims.options)
    for adaptation in ADAPTATIONS:
        if adaptation.applies(scenario, claims):
            scenario = adaptation.change(scenario, claims)
    return scenario


def _make_poststep_call(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, poststep=True, call=claims.call)


def _record_collectives(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, observe=replace(scenario.observe, collectives=True))


def _serialise(scenario: Scenario, claims: Claims) -> Scenario:
    # A rank that waits for each of its collectives cannot leave the hook before its peers have
    # entered.
    order = "free" if scenario.order == "rank0_first" else scenario.order
    return replace(scenario, serialised=True, order=order)


def _keep_claimed_dtypes(scenario: Scenario, claims: Claims) -> Scenario:
    params = tuple(spec for spec in scenario.params if spec.dtype in claims.dtypes)
    return replace(scenario, params=params or scenario.params)


def _simulate_nothing(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, simulated=())


def _simulate_enough_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    sizes = tuple(max(size, claims.min_world_size) for size in scenario.simulated)
    return replace(scenario, simulated=sizes)


def _follow_parameters(scenario: Scenario, claims: Claims) -> Scenario:
    steps = tuple(kind for kind in scenario.steps if kind != "wide")
    return replace(scenario, fused=True, initial_value=0.0, training_loop=False, steps=steps)


def _thin_out_sizes(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, params=scenario.params[::4])


def _steps_of_values(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, steps=_without_wide(VALUES.steps, claims)[:3])


def _drop_wide_steps(scenario: Scenario, claims: Claims) -> Scenario:
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


def _begin_with_random_values(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, steps=("normal", *scenario.steps[1:]))


def _repeat_for_expectation(scenario: Scenario, claims: Claims) -> Scenario:
    count = TRIALS if scenario.name in LONG_SCENARIOS else len(scenario.steps)
    return replace(scenario, steps=("constant",) * count)


def _drain_residuals(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(
        scenario, steps=scenario.steps + ("zero_all",) * _steps_until_drained(claims.delta)
    )


def _repeat_until_converged(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(
        scenario, steps=scenario.steps + ("constant",) * _steps_until_drained(claims.delta)
    )


def _shrink_gradients(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, steps=tuple(_SMALL_KINDS.get(kind, kind) for kind in scenario.steps))


def _double_first_parameter(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, params=(scenario.params[0], *scenario.params))


def _widen_matrices(scenario: Scenario, claims: Claims) -> Scenario:
    shapes = (_WIDER_SHAPES.get(spec.shape, spec.shape) for spec in scenario.params)
    params = tuple(
        replace(spec, shape=shape) for spec, shape in zip(scenario.params, shapes, strict=True)
    )
    return replace(scenario, params=params)


def _run_at_two_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, world_sizes=(2,))


def _begin_with_warmup(scenario: Scenario, claims: Claims) -> Scenario:
    saves_at = scenario.resume.saves_at
    return replace(
        scenario,
        steps=("crafted",) * claims.warmup + scenario.steps,
        fault=replace(scenario.fault, step=scenario.fault.step + claims.warmup),
        resume=replace(scenario.resume, saves_at=saves_at + claims.warmup if saves_at else 0),
    )


def _count_bytes(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, observe=replace(scenario.observe, bytes_sent=True))


def _is_chained(scenario: Scenario, claims: Claims) -> bool:
    return claims.chained and scenario.kind == VALUES.kind


def _is_serialised(scenario: Scenario, claims: Claims) -> bool:
    # `raw` has collectives come as they come, and `long` measures memory, and a wait keeps some
    # memory.
    return (
        _is_chained(scenario, claims)
        and not scenario.profile.ordered
        and scenario.name != RAW.name
        and not scenario.observe.memory
    )


def _is_fused(scenario: Scenario, claims: Claims) -> bool:
    return bool(claims.fused and scenario.params) and scenario.name != AT_SCALE.name


def _is_lossy(scenario: Scenario, claims: Claims) -> bool:
    return bool(claims.lossy and scenario.params) and scenario.name != AT_SCALE.name


def _is_long(scenario: Scenario, claims: Claims) -> bool:
    return _is_lossy(scenario, claims) and scenario.name in LONG_SCENARIOS


def _lacks_random_values(scenario: Scenario, claims: Claims) -> bool:
    lossy_at_once = scenario.name in LONG_SCENARIOS or scenario.delayed
    return (
        _is_lossy(scenario, claims)
        and bool(claims.warmup)
        and lossy_at_once
        and "normal" not in scenario.steps
    )


ADAPTATIONS = (
    Adaptation(
        lambda scenario, claims: claims.poststep,
        _make_poststep_call,
        "gradients are right after that call only",
    ),
    Adaptation(
        lambda scenario, claims: _is_chained(scenario, claims) and scenario.name == BUCKETS.name,
        _record_collectives,
        "rule 10.4 reads which collectives callbacks start",
    ),
    Adaptation(
        _is_serialised,
        _serialise,
        "without the order of a stream, callbacks on two ranks may start collectives in two orders",
    ),
    Adaptation(
        lambda scenario, claims: bool(claims.dtypes) and scenario.name != DTYPES.name,
        _keep_claimed_dtypes,
        "the subject refuses other dtypes; the scenario of that name shows it",
    ),
    Adaptation(
        lambda scenario, claims: bool(scenario.simulated and (claims.lossy or claims.fused)),
        _simulate_nothing,
        "no single step decides whether such a result is right",
    ),
    Adaptation(
        lambda scenario, claims: bool(scenario.simulated),
        _simulate_enough_ranks,
        "the subject refuses smaller groups",
    ),
    Adaptation(
        _is_fused,
        _follow_parameters,
        "parameters are compared after each step; small steps would be lost in large values, and "
        "wide "
        "ones would overflow",
    ),
    Adaptation(
        lambda scenario, claims: _is_lossy(scenario, claims) and scenario.name == SIZES.name,
        _thin_out_sizes,
        "no size is judged exactly, so that a quarter of the sizes is enough",
    ),
    Adaptation(
        lambda scenario, claims: _is_lossy(scenario, claims) and scenario.name == VIEWS.name,
        _steps_of_values,
        "rule 1.10 compares its first steps with those of `values`",
    ),
    Adaptation(
        lambda scenario, claims: _is_lossy(scenario, claims) and scenario.name != VIEWS.name,
        _drop_wide_steps,
        "small values beside large ones may be lost",
    ),
    Adaptation(
        _lacks_random_values,
        _begin_with_random_values,
        "the first lossy step must lose something",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims) and claims.lossy == UNBIASED and "inf" not in scenario.steps
        ),
        _repeat_for_expectation,
        "an expectation shows over many draws for the same gradients",
    ),
    Adaptation(
        lambda scenario, claims: _is_long(scenario, claims) and claims.lossy == FEEDBACK,
        _drain_residuals,
        "held-back values come out while zeros are fed",
    ),
    Adaptation(
        lambda scenario, claims: _is_long(scenario, claims) and claims.lossy == DIFFERENCE,
        _repeat_until_converged,
        "results converge to the mean while the same gradients are fed",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims) and scenario.name == SMALL_GRADIENTS.name
        ),
        _shrink_gradients,
        "the added steps are as small as the others",
    ),
    Adaptation(
        lambda scenario, claims: _is_lossy(scenario, claims) and scenario.params == VALUES.params,
        _double_first_parameter,
        "two matrices of one shape in a bucket: the residual of one is not the other's",
    ),
    Adaptation(
        _is_lossy,
        _widen_matrices,
        "small matrices are not worth compressing",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims) and scenario.name in ONE_WORLD_SCENARIOS
        ),
        _run_at_two_ranks,
        "many buckets over many steps take long",
    ),
    Adaptation(
        lambda scenario, claims: _is_lossy(scenario, claims) and bool(claims.warmup),
        _begin_with_warmup,
        "everything else happens after the exact steps",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims) and claims.lossy == LOCAL and scenario.fault.kind != "none"
        ),
        _count_bytes,
        "a local hook may send nothing in the failing step, and then cannot notice the failure",
    ),
)


def _steps_until_drained(delta: float) -> int:
    """Return the number n of steps after which (1 - delta)**(n / 2) <= LEFT; see
    ``oracles/lossy.py``.
    """
    return math.ceil(2 * math.log(LEFT) / math.log(1 - delta)) if delta < 1 else 2


class Plan:
    """The runs of one subject.

    Args:
        kind: the kind of subject.
        claims: its claims.
        profile: the profile that scenarios run in.
        world_sizes: the world sizes of the session.

    Attributes:
        world_sizes: the sizes that the subject accepts, in order.
        below_minimum: the sizes that it must refuse.
        plainest: the scenario that is judged first, as written.
    """

    def __init__(
        self, kind: str, claims: Claims, profile: Profile, world_sizes: Sequence[int]
    ) -> None:
        self._claims = claims
        self._profile = profile
        self.world_sizes = tuple(
            sorted(size for size in world_sizes if size >= claims.min_world_size)
        )
        self.below_minimum = tuple(sorted(set(world_sizes) - set(self.world_sizes)))
        self.plainest = KINDS[kind].scenarios[0]
        self._by_name: Mapping[str, Scenario] = {
            scenario.name: scenario for scenario in KINDS[kind].scenarios
        }

    @property
    def primary(self) -> int:
        """The world size at which the plainest scenario is judged first."""
        return next((size for size in self.world_sizes if size > 1), self.world_sizes[0])

    def adapted(self, scenario: Scenario) -> Scenario:
        """Return a scenario as it runs for this subject."""
        return adapt_scenario(scenario, self._claims, self._profile)

    def runs_of(self, rule: Rule) -> list[tuple[Scenario, int]]:
        """Return the scenarios that a rule reads, each with a world size."""
        scenarios = [self.adapted(scenario) for scenario in rule.on]
        if rule.worlds is WorldSizes.BELOW_MINIMUM:
            return [(scenario, size) for scenario in scenarios for size in self.below_minimum]
        runs = [
            (scenario, size) for scenario in scenarios for size in scenario.fits(self.world_sizes)
        ]
        if rule.worlds is WorldSizes.PRIMARY:
            return [(scenario, size) for scenario, size in runs if size == self.primary]
        if rule.worlds is WorldSizes.OTHERS:
            return [(scenario, size) for scenario, size in runs if size != self.primary]
        return runs

    def prerequisites(self, scenario: Scenario, size: int) -> list[Scenario]:
        """Return the scenarios whose runs at that size must have ended well before this one is
        tried.
        """
        if scenario.name == self.plainest.name:
            return []
        before = (self.plainest, self._by_name[scenario.prerequisite])
        adapted = [self.adapted(plainer) for plainer in before]
        return [plainer for plainer in adapted if size in plainer.fits(self.world_sizes)]
