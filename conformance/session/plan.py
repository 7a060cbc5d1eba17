"""The plan: which scenarios a rule reads, at which world sizes, and how the claims change them.

A scenario is written for a hook that is exact. ``adapt_scenario`` makes it right for the claims of
the subject at hand, by a list of adaptations. Each has a condition and a reason, and they are
applied in their order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from conformance.judging.oracles.lossy import (
    LEFT,
    LEFT_UNDER_OPTIONS,
    LONG_SCENARIOS,
    MIXING_STEPS,
    ONE_WORLD_SCENARIOS,
    OPTION_SCENARIOS,
    TRIALS,
    TRIALS_OF_VALUES,
)
from conformance.judging.rule import Rule, WorldSizes
from conformance.scenarios import kinds_in_clusters
from conformance.scenarios.clusters import CLUSTERS, with_groups_of
from conformance.scenarios.draws import drawn
from conformance.scenarios.evidence import FEEDBACK_RESCALED, FEEDBACK_UNUSED
from conformance.scenarios.feed import feed_of
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
from conformance.scenarios.long_runs import lengthened
from conformance.scenarios.model import Scenario
from conformance.scenarios.process import HEAVY, with_warmup
from conformance.scenarios.profiles import GLOO_CPU, Profile, SizeLimit
from conformance.scenarios.specials import base_kind, without_element
from conformance.scenarios.surroundings import (
    DEFAULT_DTYPES,
    JOINT,
    with_ranks,
    with_small_parameters,
)
from conformance.scenarios.training_sizes import MANY_BUCKETS, NETWORK, VAST
from conformance.scenarios.values import LAYERS, RANGES, within_range
from conformance.session.long_schedule import schedule_long_run
from conformance.session.lossy_sizes import (
    draw_smaller_sizes,
    fold_by_bucket,
    repeat_vast_steps,
    take_moments_of_buckets,
)
from conformance.subjects.claims import (
    DIFFERENCE,
    FEEDBACK,
    LOCAL,
    UNBIASED,
    Claims,
)
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
_NAMES_OF_CLUSTERS = tuple(scenario.name for scenario in (*CLUSTERS, *kinds_in_clusters.ALL))
# Under DDP's options the largest parameter may be smaller: the runs are as long as the others.
_SHORTER_SHAPES = {**_WIDER_SHAPES, (20_011,): (39, 27)}
_SMALL_KINDS = {
    "normal": "small",
    "constant": "small_constant",
    "settling": "small_constant",
    "faint": "small_faint",
}


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


def adapt_scenario(
    scenario: Scenario,
    claims: Claims,
    profile: Profile = GLOO_CPU,
    seed: int = 0,
    steps: int = 0,
) -> Scenario:
    """Return the scenario as it runs in a profile for a subject with these claims.

    Args:
        scenario: the scenario as written.
        claims: the subject's claims.
        profile: the backend and the device.
        seed: the session's seed, which the numbers of drawn scenarios come from.
        steps: the number of steps that a long run has at least.
    """
    scenario = drawn(replace(scenario, profile=profile), seed)
    scenario = lengthened(scenario, steps)
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
    if any("/" in step for step in scenario.steps):
        # These steps name parameters by their number, so that none may be left out.
        params = tuple(
            spec if spec.dtype in claims.dtypes else replace(spec, dtype=claims.dtypes[0])
            for spec in scenario.params
        )
        return replace(scenario, params=params)
    params = tuple(spec for spec in scenario.params if spec.dtype in claims.dtypes)
    return replace(scenario, params=params or scenario.params)


def _take_ranges_of_claimed_dtypes(scenario: Scenario, claims: Claims) -> Scenario:
    # float32 has the range of bfloat16.
    narrower = within_range(scenario, "bfloat16")
    params = tuple(
        spec if spec.dtype in claims.dtypes else replace(other, dtype=claims.dtypes[0])
        for spec, other in zip(scenario.params, narrower.params, strict=True)
    )
    return replace(scenario, params=params)


def _simulate_nothing(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, simulated=())


def _simulate_enough_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    least = claims.min_world_size
    taken = tuple(size for size in scenario.simulated if size >= least)
    # A simulation begins with sizes at which real ranks are right, and which differ.
    guards = tuple(size for size in (least + 1, least, least + 2) if least > 2)
    return replace(scenario, simulated=tuple(dict.fromkeys((*guards, *taken))))


def _bring_enough_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    if scenario.name == JOINT.name:
        return with_ranks(scenario, claims.min_world_size)
    return with_groups_of(scenario, claims.min_world_size)


def _use_one_bucket(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, ddp=replace(scenario.ddp, bucket_cap_mb=25.0))


def _count_ranks_of_world(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, world_only=True)


def _has_fewer_ranks(scenario: Scenario, claims: Claims) -> bool:
    groups = (*scenario.groups, *scenario.twin_groups)
    smallest = min((len(group) for group in groups), default=scenario.size)
    brings_ranks = scenario.name in (*_NAMES_OF_CLUSTERS, JOINT.name)
    return brings_ranks and smallest < claims.min_world_size


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
    if scenario.name == VALUES.name:
        count = TRIALS_OF_VALUES
    if scenario.name == LAYERS.name:
        return replace(scenario, steps=(LAYERS.steps[0], *("training_constant",) * count))
    return replace(scenario, steps=("constant",) * count)


def _drain_residuals(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, steps=scenario.steps + ("faint",) * _draining_steps(scenario, claims))


def _repeat_until_converged(scenario: Scenario, claims: Claims) -> Scenario:
    kind = "training_constant" if scenario.name == LAYERS.name else "settling"
    return replace(scenario, steps=scenario.steps + (kind,) * _draining_steps(scenario, claims))


def _draining_steps(scenario: Scenario, claims: Claims) -> int:
    left = LEFT_UNDER_OPTIONS if scenario.name in OPTION_SCENARIOS else LEFT
    return _steps_until_drained(claims.delta, left)


def _watch_mixing(scenario: Scenario, claims: Claims) -> Scenario:
    more = MIXING_STEPS - len(scenario.steps)
    return replace(scenario, steps=scenario.steps + ("normal",) * more)


def _spread_special_values(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, steps=tuple(map(without_element, scenario.steps)))


def _drain_with_faint_gradients(scenario: Scenario, claims: Claims) -> Scenario:
    count = _steps_until_drained(claims.delta, LEFT)
    return replace(
        scenario, steps=scenario.steps + ("faint",) * count, rescale_call=claims.rescaled
    )


def _lengthen_first_loss_scale(scenario: Scenario, claims: Claims) -> Scenario:
    scales = (scenario.loss_scales[0],) * claims.warmup + scenario.loss_scales
    return replace(scenario, loss_scales=scales)


def _take_first_step(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, steps=scenario.steps[:1])


def _is_judged_with_feedback(scenario: Scenario, claims: Claims) -> bool:
    """Whether a scenario for residuals is one that the claims promise to pass."""
    if scenario.name == FEEDBACK_UNUSED.name:
        return claims.keeps_unused
    return scenario.name == FEEDBACK_RESCALED.name and bool(claims.rescaled)


def _shrink_gradients(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, steps=tuple(_SMALL_KINDS.get(kind, kind) for kind in scenario.steps))


def _double_first_parameter(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, params=(scenario.params[0], *scenario.params))


def _widen_matrices(scenario: Scenario, claims: Claims) -> Scenario:
    wider = _SHORTER_SHAPES if scenario.name in OPTION_SCENARIOS else _WIDER_SHAPES
    shapes = (wider.get(spec.shape, spec.shape) for spec in scenario.params)
    params = tuple(
        replace(spec, shape=shape) for spec, shape in zip(scenario.params, shapes, strict=True)
    )
    return replace(scenario, params=params)


def _run_at_two_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, world_sizes=(2,))


def _run_at_three_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    return replace(scenario, world_sizes=(3,))


def _begin_with_warmup(scenario: Scenario, claims: Claims) -> Scenario:
    saves_at = scenario.resume.saves_at
    return replace(
        scenario,
        steps=("crafted",) * claims.warmup + scenario.steps,
        unrecorded_steps=claims.steps_of_warmup - claims.warmup,
        fault=replace(scenario.fault, step=scenario.fault.step + claims.warmup),
        resume=replace(scenario.resume, saves_at=saves_at + claims.warmup if saves_at else 0),
    )


def _is_folded_local(scenario: Scenario, claims: Claims) -> bool:
    return claims.lossy == LOCAL and scenario.name == NETWORK.name


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
    has_results = bool(scenario.params) and scenario.observe.gradients
    return bool(claims.lossy) and has_results and scenario.name != AT_SCALE.name


def _is_long(scenario: Scenario, claims: Claims) -> bool:
    return _is_lossy(scenario, claims) and scenario.name in LONG_SCENARIOS


def _lacks_random_values(scenario: Scenario, claims: Claims) -> bool:
    lossy_at_once = scenario.name in LONG_SCENARIOS or scenario.delayed
    return (
        _is_lossy(scenario, claims)
        and bool(claims.warmup)
        and lossy_at_once
        and not {"normal", "training"} & set(scenario.steps)
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
        lambda scenario, claims: (
            bool(claims.dtypes) and scenario.name not in (DTYPES.name, RANGES.name)
        ),
        _keep_claimed_dtypes,
        "the subject refuses other dtypes; the scenario of that name shows it",
    ),
    Adaptation(
        lambda scenario, claims: scenario.name == RANGES.name and bool(claims.dtypes),
        _take_ranges_of_claimed_dtypes,
        "float32 has ends of its range, too, and the subject always takes it",
    ),
    Adaptation(
        lambda scenario, claims: scenario.name == RANGES.name and bool(claims.rounded),
        lambda scenario, claims: within_range(scenario, claims.rounded or ""),
        "the dtype that the subject claims to round to holds no larger values",
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
        _has_fewer_ranks,
        _bring_enough_ranks,
        "the subject refuses smaller groups",
    ),
    Adaptation(
        lambda scenario, claims: _is_long(scenario, claims) and bool(scenario.size),
        _use_one_bucket,
        "many ranks and buckets over many steps take long",
    ),
    Adaptation(
        lambda scenario, claims: claims.world_only,
        _count_ranks_of_world,
        "a factory's world_size and rank are those of the group that it averages over",
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
        _is_lossy,
        _spread_special_values,
        "a compressor may leave out any single element",
    ),
    Adaptation(
        _lacks_random_values,
        _begin_with_random_values,
        "the first lossy step must lose something",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims)
            and claims.lossy == UNBIASED
            and not {"inf", "alike"} & set(map(base_kind, scenario.steps))
        ),
        _repeat_for_expectation,
        "an expectation shows over many draws for the same gradients",
    ),
    Adaptation(
        lambda scenario, claims: _is_long(scenario, claims) and claims.lossy == FEEDBACK,
        _drain_residuals,
        "held-back values come out while faint gradients are fed",
    ),
    Adaptation(
        lambda scenario, claims: _is_long(scenario, claims) and claims.lossy == DIFFERENCE,
        _repeat_until_converged,
        "results converge to the mean while the same gradients are fed",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims)
            and claims.lossy == LOCAL
            and scenario.name in (VALUES.name, BUCKETS.name)
        ),
        _watch_mixing,
        "partners that are drawn meet within these steps (see oracles/lossy)",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims) and scenario.name == SMALL_GRADIENTS.name
        ),
        _shrink_gradients,
        "the added steps are as small as the others",
    ),
    Adaptation(
        _is_judged_with_feedback,
        _drain_with_faint_gradients,
        "held-back values come out while faint gradients are fed, which are not zero",
    ),
    Adaptation(
        lambda scenario, claims: (
            scenario.name in (FEEDBACK_UNUSED.name, FEEDBACK_RESCALED.name)
            and not _is_judged_with_feedback(scenario, claims)
        ),
        _take_first_step,
        "the claims promise nothing here, and the certificate names it",
    ),
    Adaptation(
        lambda scenario, claims: bool(scenario.loss_scales and claims.warmup),
        _lengthen_first_loss_scale,
        "exact steps come before the others",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims) and scenario.name == DEFAULT_DTYPES.name
        ),
        lambda scenario, claims: with_small_parameters(scenario),
        "large buckets over many steps take long",
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
        lambda scenario, claims: _is_lossy(scenario, claims) and scenario.name == VAST.name,
        repeat_vast_steps,
        "the number of steps follows from delta; local results are judged in `network`",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims)
            and claims.lossy != LOCAL
            and scenario.name == MANY_BUCKETS.name
        ),
        take_moments_of_buckets,
        "as many calls of the hook in more steps take long",
    ),
    Adaptation(
        _is_folded_local,
        fold_by_bucket,
        "weights differ from bucket to bucket",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims)
            and scenario.name == (MANY_BUCKETS if claims.lossy == LOCAL else NETWORK).name
        ),
        draw_smaller_sizes,
        "lossy results repeat no table, and many steps are recorded",
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
        lambda scenario, claims: scenario.name == HEAVY.name and bool(claims.warmup),
        lambda scenario, claims: with_warmup(scenario, claims.warmup),
        "memory is judged after the warm-up",
    ),
    Adaptation(
        lambda scenario, claims: (
            _is_lossy(scenario, claims) and claims.lossy == LOCAL and scenario.fault.kind != "none"
        ),
        _count_bytes,
        "a local hook may send nothing in the failing step, and then cannot notice the failure",
    ),
    Adaptation(
        lambda scenario, claims: bool(scenario.long_run) and claims.lossy == LOCAL,
        _run_at_three_ranks,
        "of two ranks, one partner is all others",
    ),
    # Last: it replaces the steps.
    Adaptation(
        lambda scenario, claims: bool(scenario.long_run),
        schedule_long_run,
        "which gradients show a defect depends on the claim",
    ),
)


def _steps_until_drained(delta: float, left: float) -> int:
    """Return the number n of steps after which (1 - delta)**(n / 2) <= left; see
    ``oracles/lossy``.
    """
    return math.ceil(2 * math.log(left) / math.log(1 - delta)) if delta < 1 else 2


class Plan:
    """The runs of one subject.

    Args:
        kind: the kind of subject.
        claims: its claims.
        profile: the profile that scenarios run in.
        world_sizes: the world sizes of the session.
        seed: the seed that the numbers of drawn scenarios come from.
        steps: the number of steps that a long run has at least.
        limit: the largest number of ranks that a scenario may bring itself; None for any.

    Attributes:
        world_sizes: the sizes that the subject accepts, in order.
        below_minimum: the sizes that it must refuse.
        plainest: the scenario that is judged first, as written.
    """

    def __init__(
        self,
        kind: str,
        claims: Claims,
        profile: Profile,
        world_sizes: Sequence[int],
        seed: int = 0,
        steps: int = 0,
        limit: SizeLimit | None = None,
    ) -> None:
        self._claims = claims
        self._limit = limit
        self._profile = profile
        self._seed = seed
        self._steps = steps
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
        return adapt_scenario(scenario, self._claims, self._profile, self._seed, self._steps)

    @property
    def steps_of_long_run(self) -> int:
        """The number of steps of the longest run; 0 if the kind has no long run."""
        runs = [self.adapted(scenario) for scenario in self._by_name.values() if scenario.long_run]
        return max((feed_of(scenario).steps for scenario in runs), default=0)

    def named(self, name: str) -> Scenario:
        """Return the scenario of a name, as it runs for this subject."""
        return self.adapted(self._by_name[name])

    def place_of(self, scenario: Scenario) -> int:
        """Return the place of a scenario in the order in which scenarios run."""
        return list(self._by_name).index(scenario.name)

    def runs_of(self, rule: Rule) -> list[tuple[Scenario, int]]:
        """Return the scenarios that a rule reads, each with a world size."""
        if rule.probes:
            return []  # its runs are known once others have been made
        scenarios = [self.adapted(scenario) for scenario in rule.on]
        if rule.worlds is WorldSizes.BELOW_MINIMUM:
            return [(scenario, size) for scenario in scenarios for size in self.below_minimum]
        runs = [
            (scenario, size)
            for scenario in scenarios
            for size in scenario.fits(self.world_sizes)
            if not self._exceeds_limit(scenario)
        ]
        if rule.worlds is WorldSizes.PRIMARY:
            return [(scenario, size) for scenario, size in runs if size == self.primary]
        if rule.worlds is WorldSizes.OTHERS:
            return [(scenario, size) for scenario, size in runs if size != self.primary]
        return runs

    def beyond_limit(self, rule: Rule) -> list[int]:
        """Return the numbers of ranks that a rule's scenarios bring, and that are too many."""
        scenarios = map(self.adapted, rule.on)
        return [scenario.own_size for scenario in scenarios if self._exceeds_limit(scenario)]

    def _exceeds_limit(self, scenario: Scenario) -> bool:
        return self._limit is not None and scenario.own_size > self._limit.largest

    def prerequisites(self, scenario: Scenario, size: int) -> list[tuple[Scenario, int]]:
        """Return the runs that must have ended well before this one is tried.

        They have the same world size. A scenario that brings a size of its own has those at the
        smallest size above 1 in their place.
        """
        if scenario.name == self.plainest.name:
            return []
        before = (self.plainest, self._by_name[scenario.prerequisite])
        adapted = [self.adapted(plainer) for plainer in before]
        if size not in self.world_sizes:
            size = self.primary
        return [(plainer, size) for plainer in adapted if size in plainer.fits(self.world_sizes)]
