"""The adaptations of scenarios to claims: each has a condition, a change and a reason.

A scenario is written for a hook that is exact. ``adapt_scenario`` makes it right for the claims of
the subject at hand. Adaptations are applied in their order.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from conformance.judging.oracles.lossy import ONE_WORLD_SCENARIOS
from conformance.scenarios import process
from conformance.scenarios.cluster_draws import train_in_cluster
from conformance.scenarios.clusters import EQUAL_NODES, UNEQUAL_NODES, UNEVEN_GROUPS
from conformance.scenarios.draws import drawn
from conformance.scenarios.dust import DUST
from conformance.scenarios.evidence import (
    RESIDUALS,
    SPECIAL_FIRST,
    SPECIAL_LARGE,
    add_special_among_zeros,
)
from conformance.scenarios.hook import (
    ACCUMULATED,
    BUCKETS,
    COMBINED,
    COMPLEX,
    DTYPES,
    PEER_DIES,
    RESUMED,
    RESUMED_ONE,
    SAVED,
    SAVED_ONE,
    SIZES,
    SMALL_GRADIENTS,
    SPECIAL,
    STATIC,
    TWO_MODELS,
    UNEVEN,
    VALUES,
    VALUES_AGAIN,
    VIEWS,
)
from conformance.scenarios.impulses import IMPULSES
from conformance.scenarios.long_runs import lengthened
from conformance.scenarios.model import EACH_MODEL_FAILS, Scenario
from conformance.scenarios.mostly_zero import add_mostly_zero_steps
from conformance.scenarios.other_dtypes import WITH_OTHER_DTYPES, add_other_dtypes
from conformance.scenarios.process import with_warmup
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.scenarios.reused_states import ROLLED_BACK
from conformance.scenarios.seeds import generator
from conformance.scenarios.sparse import SPARSE
from conformance.scenarios.specials import base_kind
from conformance.scenarios.surroundings import (
    AUTOCAST,
    DEFAULT_DTYPES,
    JOINT,
    JOINT_ALIKE,
    feed_narrow_values,
    with_small_parameters,
)
from conformance.scenarios.training_sizes import (
    MANY_BUCKETS,
    NETWORK,
    VAST,
    add_large_complex,
)
from conformance.scenarios.values import LAYERS, RANGES, within_range
from conformance.session import lossy_steps
from conformance.session import scenario_changes as changes
from conformance.session.long_schedule import schedule_long_run
from conformance.session.lossy_sizes import (
    draw_smaller_sizes,
    fold_by_bucket,
    repeat_vast_steps,
    take_moments_of_buckets,
)
from conformance.subjects.claims import (
    CONTRACTION,
    DIFFERENCE,
    FEEDBACK,
    LOCAL,
    UNBIASED,
    Claims,
)
from conformance.subjects.kinds import KINDS

_IN_CLUSTERS = tuple(s.name for s in (UNEQUAL_NODES, EQUAL_NODES, UNEVEN_GROUPS))
# The scenarios in which local results are watched until all ranks have met.
_MIXING = (VALUES.name, BUCKETS.name, ACCUMULATED.name, SAVED.name, RESUMED.name, *_IN_CLUSTERS)
_OF_SINGLE_STEPS = {
    LAYERS.name: add_mostly_zero_steps,
    SPECIAL_LARGE.name: add_special_among_zeros,
    AUTOCAST.name: feed_narrow_values,
}
_IN_TWO_BUCKETS = tuple(s.name for s in (JOINT, JOINT_ALIKE, ACCUMULATED, COMBINED, STATIC, UNEVEN))

# The scenarios in which some gradients lie in a few elements. With feedback signs of one scale send
# a lone element so slowly that only ``layers`` waits for it (oracles/lossy, "Slow compressors").
_FEW_ELEMENTS = {
    CONTRACTION: (VALUES.name, VALUES_AGAIN.name, LAYERS.name),
    FEEDBACK: (LAYERS.name,),
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


ADAPTATIONS = (
    Adaptation(
        lambda scenario, claims: claims.poststep,
        changes.make_poststep_call,
        "gradients are right after that call only",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_chained(scenario, claims) and scenario.name == BUCKETS.name
        ),
        changes.record_collectives,
        "rule 10.4 reads which collectives callbacks start",
    ),
    Adaptation(
        changes.is_serialised,
        changes.serialise,
        "without the order of a stream, callbacks on two ranks may start collectives in two orders",
    ),
    Adaptation(
        changes.has_uneven_groups,
        changes.draw_groups_and_rows,
        "lossy hooks are judged over many steps with as many rows, and fused ones take no others",
    ),
    Adaptation(
        lambda scenario, claims: scenario.name == PEER_DIES.name and claims.lossy != LOCAL,
        lambda scenario, claims: replace(scenario, nodes=(1, 1)),
        "a local hook may exchange nothing between nodes in the failing step, and then cannot "
        "notice the failure",
    ),
    Adaptation(
        lambda scenario, claims: scenario.name == COMPLEX.name and not claims.lossy,
        lambda scenario, claims: add_large_complex(scenario, generator(scenario, "large")),
        "lossy hooks take too many steps for a bucket of that size",
    ),
    Adaptation(
        lambda scenario, claims: scenario.name in WITH_OTHER_DTYPES and not claims.lossy,
        lambda scenario, claims: add_other_dtypes(scenario),
        "lossy hooks take too many steps for as many buckets",
    ),
    Adaptation(
        lambda scenario, claims: (
            scenario.name in _OF_SINGLE_STEPS and not (claims.lossy or claims.fused)
        ),
        lambda scenario, claims: _OF_SINGLE_STEPS[scenario.name](
            scenario, generator(scenario, "zeros")
        ),
        "lossy results are judged over many steps, with gradients of their own",
    ),
    Adaptation(
        lambda scenario, claims: (
            scenario.name in _IN_CLUSTERS and not (claims.lossy or claims.fused)
        ),
        lambda scenario, claims: train_in_cluster(scenario, generator(scenario, "training")),
        "lossy hooks take too many steps for parameters of these sizes, and those of fused hooks "
        "are followed from the first step on",
    ),
    Adaptation(
        lambda scenario, claims: (
            bool(claims.dtypes) and scenario.name not in (DTYPES.name, RANGES.name)
        ),
        changes.keep_claimed_dtypes,
        "the subject refuses other dtypes; the scenario of that name shows it",
    ),
    Adaptation(
        lambda scenario, claims: scenario.name == RANGES.name and bool(claims.dtypes),
        changes.take_ranges_of_claimed_dtypes,
        "float32 has ends of its range, too, and the subject always takes it",
    ),
    Adaptation(
        lambda scenario, claims: scenario.name == RANGES.name and bool(claims.rounded),
        lambda scenario, claims: within_range(scenario, claims.rounded or ""),
        "the dtype that the subject claims to round to holds no larger values",
    ),
    Adaptation(
        lambda scenario, claims: bool(scenario.simulated and (claims.lossy or claims.fused)),
        changes.simulate_nothing,
        "no single step decides whether such a result is right",
    ),
    Adaptation(
        lambda scenario, claims: bool(scenario.simulated),
        changes.simulate_enough_ranks,
        "the subject refuses smaller groups",
    ),
    Adaptation(
        changes.has_fewer_ranks,
        changes.bring_enough_ranks,
        "the subject refuses smaller groups",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_long(scenario, claims)
            and bool(scenario.size)
            and scenario.name != JOINT.name  # whose several buckets mix
        ),
        changes.use_one_bucket,
        "many ranks and buckets over many steps take long",
    ),
    Adaptation(
        lambda scenario, claims: claims.world_only,
        changes.count_ranks_of_world,
        "a factory's world_size and rank are those of the group that it averages over",
    ),
    Adaptation(
        lambda scenario, claims: (
            scenario.name == SPARSE.name and bool(claims.lossy or claims.fused)
        ),
        lossy_steps.drop_special_steps,
        "residuals and optimizers keep NaN",
    ),
    Adaptation(
        changes.is_fused,
        changes.follow_parameters,
        "parameters are compared after each step; small steps would be lost in large values, and "
        "wide "
        "ones would overflow",
    ),
    Adaptation(
        lambda scenario, claims: changes.is_lossy(scenario, claims) and scenario.name == SIZES.name,
        changes.thin_out_sizes,
        "no size is judged exactly, so that a quarter of the sizes is enough",
    ),
    Adaptation(
        lambda scenario, claims: changes.is_lossy(scenario, claims) and scenario.name == VIEWS.name,
        lossy_steps.steps_of_values,
        "rule 1.10 compares its first steps with those of `values`",
    ),
    Adaptation(
        lambda scenario, claims: changes.is_lossy(scenario, claims) and scenario.name != VIEWS.name,
        lossy_steps.drop_wide_steps,
        "small values beside large ones may be lost",
    ),
    Adaptation(
        changes.is_lossy,
        changes.spread_special_values,
        "a compressor may leave out any single element",
    ),
    Adaptation(
        changes.lacks_random_values,
        lossy_steps.begin_with_random_values,
        "the first lossy step must lose something",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and claims.lossy == UNBIASED
            and not {"nan", "inf", "alike", DUST} & set(map(base_kind, scenario.steps))
        ),
        lossy_steps.repeat_for_expectation,
        "an expectation shows over many draws for the same gradients",
    ),
    Adaptation(
        lambda scenario, claims: changes.is_long(scenario, claims) and claims.lossy == FEEDBACK,
        lossy_steps.drain_residuals,
        "held-back values come out while faint gradients are fed",
    ),
    Adaptation(
        lambda scenario, claims: scenario.name == IMPULSES.name and claims.lossy == FEEDBACK,
        lossy_steps.feed_impulse_after_drain,
        "an impulse shows alone if nothing else is held back",
    ),
    Adaptation(
        lambda scenario, claims: changes.is_long(scenario, claims) and claims.lossy == DIFFERENCE,
        lossy_steps.repeat_until_converged,
        "results converge to the mean while the same gradients are fed",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and claims.lossy != LOCAL
            and scenario.name in (SPECIAL.name, SPECIAL_FIRST.name)
        ),
        lossy_steps.show_recovery,
        "a result that is finite again may be wrong for good",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and claims.lossy == LOCAL
            and scenario.name in _MIXING
        ),
        lossy_steps.watch_mixing,
        "partners that are drawn meet within these steps (see oracles/lossy)",
    ),
    Adaptation(
        lambda scenario, claims: bool(claims.lossy) and scenario.name == EQUAL_NODES.name,
        changes.run_on_many_ranks,
        "lossy hooks cannot be simulated: sums of a few bits overflow on many ranks",
    ),
    Adaptation(
        lambda scenario, claims: (
            claims.mixes and scenario.name in (EQUAL_NODES.name, UNEVEN_GROUPS.name)
        ),
        changes.take_many_buckets,
        "partners that follow a count of calls are the same in every step if the number of buckets "
        "is a multiple of the number of their turns",
    ),
    Adaptation(
        lambda scenario, claims: (
            claims.lossy == CONTRACTION and scenario.name in (UNEQUAL_NODES.name, EQUAL_NODES.name)
        ),
        changes.let_each_rank_weigh_most,
        "the norm of a mean hardly shows that ranks count unequally if their gradients are alike",
    ),
    Adaptation(
        lambda scenario, claims: claims.mixes and scenario.fault.kind == "collective_raises",
        changes.fail_a_later_collective,
        "a local hook has steps without a collective",
    ),
    Adaptation(
        lambda scenario, claims: claims.mixes and scenario.fault.kind == EACH_MODEL_FAILS,
        changes.fail_a_first_collective,
        "ranks may issue different numbers of collectives, and would wait for those that never "
        "come",
    ),
    Adaptation(
        lambda scenario, claims: scenario.name == ACCUMULATED.name and claims.period > 1,
        changes.take_micro_batches_of_period,
        "a period that counts micro-batches shows if their number has a factor in common with it",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims) and scenario.name == SMALL_GRADIENTS.name
        ),
        lossy_steps.shrink_gradients,
        "the added steps are as small as the others",
    ),
    Adaptation(
        changes.is_judged_with_feedback,
        lossy_steps.drain_with_faint_gradients,
        "held-back values come out while faint gradients are fed, which are not zero",
    ),
    Adaptation(
        lambda scenario, claims: (
            scenario.name in RESIDUALS and not changes.is_judged_with_feedback(scenario, claims)
        ),
        changes.take_first_step,
        "the claims promise nothing here, and the certificate names it",
    ),
    Adaptation(
        lambda scenario, claims: (
            scenario.name == TWO_MODELS.name and bool(claims.rescaled or claims.checkpointable)
        ),
        changes.call_for_twin,
        "a call for one of two models changes nothing of the other one",
    ),
    Adaptation(
        lambda scenario, claims: (
            bool(claims.rescaled and claims.checkpointable)
            and claims.warmup < 2  # else the state is saved within the warm-up
            and scenario.name in (SAVED_ONE.name, RESUMED_ONE.name, ROLLED_BACK.name)
        ),
        changes.save_after_rescale,
        "a factor of the loss scale may belong to the state",
    ),
    Adaptation(
        lambda scenario, claims: bool(scenario.loss_scales and claims.warmup),
        changes.lengthen_first_loss_scale,
        "exact steps come before the others",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and scenario.name in (DEFAULT_DTYPES.name, AUTOCAST.name)
        ),
        lambda scenario, claims: with_small_parameters(scenario),
        "large buckets over many steps take long",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and scenario.params[: len(VALUES.params)] == VALUES.params
        ),
        changes.double_first_parameter,
        "two matrices of one shape in a bucket: the residual of one is not the other's",
    ),
    Adaptation(
        changes.is_lossy,
        changes.widen_matrices,
        "small matrices are not worth compressing",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and claims.lossy != LOCAL
            and scenario.name in _IN_TWO_BUCKETS
        ),
        changes.use_two_buckets,
        "the hook is called for each bucket, over many steps; `buckets` has five",
    ),
    Adaptation(
        lambda scenario, claims: changes.is_lossy(scenario, claims) and scenario.name == VAST.name,
        repeat_vast_steps,
        "the number of steps follows from delta; local results are judged in `network`",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and claims.lossy != LOCAL
            and scenario.name == MANY_BUCKETS.name
        ),
        take_moments_of_buckets,
        "as many calls of the hook in more steps take long",
    ),
    Adaptation(
        changes.is_folded_local,
        fold_by_bucket,
        "weights differ from bucket to bucket",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and scenario.name == (MANY_BUCKETS if claims.lossy == LOCAL else NETWORK).name
        ),
        draw_smaller_sizes,
        "lossy results repeat no table, and many steps are recorded",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and scenario.name in _FEW_ELEMENTS.get(claims.lossy, ())
        ),
        changes.feed_few_elements,
        "a few elements that are never sent are little of a gradient that is spread over a bucket",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims) and scenario.name in ONE_WORLD_SCENARIOS
        ),
        changes.run_at_two_ranks,
        "many buckets over many steps take long",
    ),
    Adaptation(
        lambda scenario, claims: changes.is_lossy(scenario, claims) and bool(claims.warmup),
        changes.begin_with_warmup,
        "everything else happens after the exact steps",
    ),
    Adaptation(
        lambda scenario, claims: (
            scenario.name == ROLLED_BACK.name and not scenario.unrecorded_steps
        ),
        changes.start_over,
        "a state from before the first step has none of the values that later steps add",
    ),
    Adaptation(
        lambda scenario, claims: (
            scenario.name in {heavy.name for heavy in process.ALL} and bool(claims.warmup)
        ),
        lambda scenario, claims: with_warmup(scenario, claims.warmup),
        "memory is judged after the warm-up",
    ),
    Adaptation(
        lambda scenario, claims: (
            changes.is_lossy(scenario, claims)
            and claims.lossy == LOCAL
            and scenario.fault.kind != "none"
        ),
        changes.count_bytes,
        "a local hook may send nothing in the failing step, and then cannot notice the failure",
    ),
    Adaptation(
        lambda scenario, claims: bool(scenario.long_run) and claims.lossy == LOCAL,
        changes.run_at_three_ranks,
        "of two ranks, one partner is all others",
    ),
    # Last: it replaces the steps.
    Adaptation(
        lambda scenario, claims: bool(scenario.long_run),
        schedule_long_run,
        "which gradients show a defect depends on the claim",
    ),
)
