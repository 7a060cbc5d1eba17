"""Changes of scenarios under claims, and their conditions; ``adaptations.py`` has the reasons.

A condition and a change take the scenario and the claims.
"""

import math
from dataclasses import replace

from conformance.judging.oracles.lossy import (
    LONG_SCENARIOS,
    MIXING_STEPS,
    OPTION_SCENARIOS,
)
from conformance.judging.oracles.optimizer_claim import claimed_rate
from conformance.scenarios import (
    averager_training,
    join_loop_draws,
    joins_in_loops,
    kinds_in_clusters,
    optimizer_training,
)
from conformance.scenarios.calls_for_twin import with_calls_for_twin
from conformance.scenarios.clusters import CLUSTERS, UNUSED_GROUPS, with_groups_of
from conformance.scenarios.evidence import (
    FEEDBACK_OVERFLOWN,
    FEEDBACK_RESCALED,
    FEEDBACK_RESTING,
    FEEDBACK_UNUSED,
    SPECIAL_DEEP,
    SPECIAL_FIRST,
    SPECIAL_LARGE,
)
from conformance.scenarios.few_elements import in_all_parameters, in_each_parameter
from conformance.scenarios.hook import (
    AT_SCALE,
    COMPLEX,
    RAW,
    RESUMED_ONE,
    SAVED_ONE,
    VALUES,
    VIEWS,
)
from conformance.scenarios.micro_batches import with_micro_batches
from conformance.scenarios.model import DRAINING, Param, Scenario
from conformance.scenarios.reused_states import RESUMED_BY_OTHER_RANKS, ROLLED_BACK
from conformance.scenarios.seeds import generator
from conformance.scenarios.sparse import SPARSE, draw_rows, with_uneven_groups
from conformance.scenarios.specials import (
    SPECIAL_EVERY,
    with_all_elements,
    with_drawn_elements,
    without_element,
)
from conformance.scenarios.surroundings import JOINT
from conformance.scenarios.training_sizes import NETWORK
from conformance.scenarios.values import LAYERS, within_range
from conformance.session.lossy_steps import put_warm_up_after_overflows
from conformance.subjects.claims import (
    CONTRACTION,
    DIFFERENCE,
    FEEDBACK,
    LOCAL,
    Claims,
)
from conformance.subjects.kinds import HOOK, KINDS

# Shapes that a low rank compresses: (n + m) rank 2 < n m up to rank 6. Of the largest shape nearly
# a whole block is left at the end, whatever power of two a block has, so that a dropped tail shows.
_WIDER_SHAPES = {
    (5, 3): (24, 32),
    (3, 5): (24, 32),
    (6, 5): (32, 24),
    (4, 3, 2, 5): (24, 3, 2, 5),
    (20_011,): (91, 225),
}
# 256 bytes: of the parameters of ``buckets`` the last three, and the first two.
_CAP_OF_HALVES = 256 / 2**20
# A bucket of two elements of float32 or more is closed once the next parameter comes.
_CAP_OF_TWO = 8 / 2**20
_LARGE_BUCKETS = 6
# Divided by delta: with a chance of exp(-20) a compressor sends none of so many elements.
_SURELY_SENT = 20
_ON_TWO_GROUPS = (averager_training.TWO_GROUPS.name, optimizer_training.TWO_GROUPS.name)
_WITH_RANDOM_VALUES = (
    VIEWS.name,  # compared with `values`
    *(scenario.name for scenario in KINDS[HOOK].scenarios if "normal" in scenario.steps),
)
_SAVED_EARLY = tuple(one.name for one in (SAVED_ONE, RESUMED_ONE, ROLLED_BACK))
# Hooks that average over WORLD are not tried on groups here.
_ON_GROUPS = (ROLLED_BACK.name, UNUSED_GROUPS.name, FEEDBACK_UNUSED.name)
# Of uneven groups the gradients would not have exact means over WORLD.
_ON_UNEVEN_GROUPS = (COMPLEX.name, SPARSE.name)
_NAMES_OF_CLUSTERS = tuple(scenario.name for scenario in (*CLUSTERS, *kinds_in_clusters.ALL))
# Under DDP's options the largest parameter may be smaller: the runs are as long as the others.
_SHORTER_SHAPES = {**_WIDER_SHAPES, (20_011,): (39, 27)}


def make_poststep_call(scenario: Scenario, claims: Claims) -> Scenario:
    """Let the trainer make the claimed call after each backward."""
    return replace(scenario, poststep=True, call=claims.call)


def has_uneven_groups(scenario: Scenario, claims: Claims) -> bool:
    """Whether a scenario of sparse or complex gradients is drawn anew."""
    takes_pairs = claims.min_world_size <= 2
    return scenario.name in _ON_UNEVEN_GROUPS and takes_pairs and not (claims.lossy or claims.fused)


def draw_groups_and_rows(scenario: Scenario, claims: Claims) -> Scenario:
    """Draw uneven groups, and how many rows of sparse gradients ranks have."""
    draw = with_uneven_groups if scenario.name == COMPLEX.name else draw_rows
    return draw(scenario, generator(scenario, "groups"))


def record_collectives(scenario: Scenario, claims: Claims) -> Scenario:
    """Record the collectives."""
    return replace(scenario, observe=replace(scenario.observe, collectives=True))


def serialise(scenario: Scenario, claims: Claims) -> Scenario:
    """Let each collective end before the next one begins."""
    # A rank that waits for each of its collectives cannot leave the hook before its peers have
    # entered.
    order = "free" if scenario.order == "rank0_first" else scenario.order
    return replace(scenario, serialised=True, order=order)


def keep_claimed_dtypes(scenario: Scenario, claims: Claims) -> Scenario:
    """Keep the parameters whose dtype the subject takes."""
    if scenario.has_versions or any("/" in step for step in scenario.steps):
        # Parameters are named by their numbers, so that none may be left out.
        params = tuple(
            spec if spec.dtype in claims.dtypes else replace(spec, dtype=claims.dtypes[0])
            for spec in scenario.params
        )
        return replace(scenario, params=params)
    params = tuple(spec for spec in scenario.params if spec.dtype in claims.dtypes)
    return replace(scenario, params=params or scenario.params)


def take_ranges_of_claimed_dtypes(scenario: Scenario, claims: Claims) -> Scenario:
    """Keep the ranges of the dtypes that the subject takes."""
    # float32 has the range of bfloat16.
    narrower = within_range(scenario, "bfloat16")
    params = tuple(
        spec if spec.dtype in claims.dtypes else replace(other, dtype=claims.dtypes[0])
        for spec, other in zip(scenario.params, narrower.params, strict=True)
    )
    return replace(scenario, params=params)


def simulate_nothing(scenario: Scenario, claims: Claims) -> Scenario:
    """Simulate no ranks."""
    return replace(scenario, simulated=())


def simulate_enough_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    """Simulate as many ranks as the subject needs, and more."""
    least = claims.min_world_size
    taken = tuple(size for size in scenario.simulated if size >= least)
    # A simulation begins with sizes at which real ranks are right, and which differ.
    guards = tuple(size for size in (least + 1, least, least + 2) if least > 2)
    return replace(scenario, simulated=tuple(dict.fromkeys((*guards, *taken))))


def bring_enough_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    """Give every group as many ranks as the subject needs."""
    if scenario.name in _ON_TWO_GROUPS:
        return averager_training.on_two_groups(scenario, generator(scenario), claims.min_world_size)
    if scenario.name == joins_in_loops.TWO_GROUPS.name:
        return join_loop_draws.draw_groups(scenario, generator(scenario), claims.min_world_size)
    if scenario.name == RESUMED_BY_OTHER_RANKS.name:
        return replace(scenario, size=claims.min_world_size + 1)
    return with_groups_of(scenario, claims.min_world_size)


def use_one_bucket(scenario: Scenario, claims: Claims) -> Scenario:
    """Put all parameters into one bucket."""
    return replace(scenario, ddp=replace(scenario.ddp, bucket_cap_mb=25.0))


def use_two_buckets(scenario: Scenario, claims: Claims) -> Scenario:
    """Put parameters into two buckets, each with one that is worth compressing."""
    return replace(scenario, ddp=replace(scenario.ddp, bucket_cap_mb=_CAP_OF_HALVES))


def count_ranks_of_world(scenario: Scenario, claims: Claims) -> Scenario:
    """Let the subject see the numbers of WORLD."""
    if scenario.name in _ON_GROUPS or has_uneven_groups(scenario, claims):
        # Rule 2.7 judges the claim. Here DDP would drop what ranks of another group have used.
        size = max(map(len, scenario.groups))
        nodes = (1, size - 1) if scenario.nodes else ()
        scenario = replace(scenario, groups=(), idle=(), size=size, nodes=nodes)
    return replace(scenario, world_only=True)


def has_fewer_ranks(scenario: Scenario, claims: Claims) -> bool:
    """Whether a scenario that brings its ranks has too few for the subject."""
    groups = (*scenario.groups, *scenario.twin_groups)
    smallest = min((len(group) for group in groups), default=scenario.size)
    brings_ranks = scenario.name in (
        *_NAMES_OF_CLUSTERS,
        *_ON_TWO_GROUPS,
        joins_in_loops.TWO_GROUPS.name,
        JOINT.name,
        RESUMED_BY_OTHER_RANKS.name,
        ROLLED_BACK.name,
        FEEDBACK_UNUSED.name,
    )
    return brings_ranks and smallest < claims.min_world_size


def follow_parameters(scenario: Scenario, claims: Claims) -> Scenario:
    """Record parameters after each step, beginning with zeros."""
    steps = tuple(kind for kind in scenario.steps if kind != "wide")
    return replace(
        scenario,
        fused=True,
        fused_rate=claimed_rate(claims.fused),
        initial_value=0.0,
        training_loop=False,
        steps=steps,
    )


def thin_out_sizes(scenario: Scenario, claims: Claims) -> Scenario:
    """Keep every fourth parameter."""
    return replace(scenario, params=scenario.params[::4])


def take_many_buckets(scenario: Scenario, claims: Claims) -> Scenario:
    """Take parameters in buckets of their own.

    On groups of four ranks there are 24, a multiple of 2, 3, 4, 6, 8 and 12. On eight ranks there
    are 13 to 20, so that in time each number up to 20 divides one of the two. Six of the buckets,
    at drawn places, are large enough to solve for the weights of ranks. The others have two or
    three elements: they are counted, and cost less.
    """
    numbers = generator(scenario, "buckets")
    count = 24 if scenario.groups else numbers.randint(13, 20)
    sizes = [numbers.randint(17, 99) for _ in range(_LARGE_BUCKETS)]
    sizes += [numbers.randint(2, 3) for _ in range(count - _LARGE_BUCKETS)]
    numbers.shuffle(sizes)
    params = tuple(Param((size,)) for size in sizes)
    ddp = replace(scenario.ddp, bucket_cap_mb=_CAP_OF_TWO)
    return replace(scenario, params=params, ddp=ddp)


def let_each_rank_weigh_most(scenario: Scenario, claims: Claims) -> Scenario:
    """Add a step for each rank in which its gradients are far larger than those of the others."""
    return replace(scenario, steps=scenario.steps + ("heavy_in_turn",) * scenario.size)


def run_on_many_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    """Run on 12 ranks, on two, three, four or six nodes of equal size.

    If results are judged by their norm, there are 10 ranks: in a tree of pairs the last two have no
    partners, and are easily counted for more. Local results need no sums of many ranks: there are
    8.
    """
    size, divisors = {CONTRACTION: (10, (2, 5)), LOCAL: (8, (2, 4))}.get(
        claims.lossy, (12, (2, 3, 4, 6))
    )
    nodes = generator(scenario).choice(divisors)
    return replace(scenario, size=size, nodes=(size // nodes,) * nodes)


def fail_a_later_collective(scenario: Scenario, claims: Claims) -> Scenario:
    """Fail the first collective of the next steps; in some, ranks stay alone."""
    more = MIXING_STEPS - 1
    return replace(
        scenario,
        steps=scenario.steps + scenario.steps[-1:] * more,
        fault=replace(scenario.fault, attempts=scenario.fault.attempts + more),
    )


def fail_a_first_collective(scenario: Scenario, claims: Claims) -> Scenario:
    """Fail the first collective of a rank, and try as many steps more as ranks may stay alone."""
    attempts = scenario.fault.attempts + MIXING_STEPS
    return replace(scenario, fault=replace(scenario.fault, succeeding=0, attempts=attempts))


def take_micro_batches_of_period(scenario: Scenario, claims: Claims) -> Scenario:
    """Take as many micro-batches a step as the smallest factor of the claimed period; two or four
    if the period is even.
    """
    numbers = generator(scenario)
    count = next(n for n in range(2, claims.period + 1) if claims.period % n == 0)
    if count == 2:
        count = numbers.choice((2, 4))
    return with_micro_batches(scenario, count, numbers)


def spread_special_values(scenario: Scenario, claims: Claims) -> Scenario:
    """Put special values into so many elements that a compressor sends some of them.

    In a large parameter there are up to a fifth of its elements, at drawn places: if a compressor
    delivers a share ``delta`` of what it is fed, it leaves out 20 / delta elements of a parameter
    with a chance of exp(-20). Under claims without ``delta`` every fifth element is special. In a
    small parameter these might be left out, so that all of its elements are special. In a bucket of
    several small parameters a whole one might be, so that all of them are.
    """
    if scenario.name == SPECIAL_LARGE.name:
        if claims.lossy not in (CONTRACTION, FEEDBACK, DIFFERENCE):
            return replace(scenario, steps=tuple(map(without_element, scenario.steps)))
        numbers = generator(scenario, "special elements")
        most = math.prod(scenario.params[-1].shape) // SPECIAL_EVERY
        least = min(most, math.ceil(_SURELY_SENT / claims.delta))
        counts = [int(least * (most / least) ** numbers.random()) for _ in scenario.steps]
        places = [
            with_drawn_elements(kind, count, numbers.randrange(10**6))
            for kind, count in zip(scenario.steps, counts, strict=True)
        ]
        return replace(scenario, steps=tuple(places))
    is_alone = scenario.name == SPECIAL_DEEP.name
    steps = tuple(with_all_elements(kind, is_alone) for kind in scenario.steps)
    return replace(scenario, steps=steps)


def save_after_rescale(scenario: Scenario, claims: Claims) -> Scenario:
    """Change the loss scale before the state is saved, and once more when it has been loaded; the
    steps and the factors are drawn, alike for the run that saves and the one that resumes. If a
    process goes back to its own state, the scale changes before that, and goes back with the state.
    """
    numbers = generator(replace(scenario, name=SAVED_ONE.name), "loss scales")
    saves_at, end = scenario.resume.saves_at, scenario.resume.rolls_back_at or len(scenario.steps)
    first = numbers.randint(4, 12)
    second = first + numbers.choice((-1, 1)) * numbers.randint(1, 4)
    before = numbers.randrange(1, saves_at)
    third = second + numbers.choice((-1, 1)) * numbers.randint(1, 4)
    rolls_back = bool(scenario.resume.rolls_back_at)
    again = numbers.randrange(saves_at + rolls_back, end)
    scales = (first,) * before + (second,) * (again - before) + (third,) * (end - again)
    scales += scales[saves_at:] if rolls_back else ()
    return replace(scenario, loss_scales=scales, rescale_call=claims.rescaled)


def call_for_twin(scenario: Scenario, claims: Claims) -> Scenario:
    """Rescale the twin's state, and save and load it, as far as the subject claims to allow it."""
    return with_calls_for_twin(scenario, claims.rescaled, loads=claims.checkpointable)


def lengthen_first_loss_scale(scenario: Scenario, claims: Claims) -> Scenario:
    """Keep the first loss scale during a claimed warm-up."""
    scales = (scenario.loss_scales[0],) * claims.warmup + scenario.loss_scales
    return replace(scenario, loss_scales=scales)


def take_first_step(scenario: Scenario, claims: Claims) -> Scenario:
    """Take the first step alone."""
    return replace(scenario, steps=scenario.steps[:1], unrecorded_steps=0)


def is_judged_with_feedback(scenario: Scenario, claims: Claims) -> bool:
    """Whether a scenario for residuals is one that the claims promise to pass."""
    if scenario.name == FEEDBACK_UNUSED.name:
        return claims.keeps_unused
    if scenario.name == FEEDBACK_RESTING.name:
        return (claims.keeps_unused or claims.lossy == DIFFERENCE) and bool(claims.rescaled)
    rescaled = (FEEDBACK_RESCALED.name, FEEDBACK_OVERFLOWN.name)
    return scenario.name in rescaled and bool(claims.rescaled)


def double_first_parameter(scenario: Scenario, claims: Claims) -> Scenario:
    """Put a parameter of the first shape in front."""
    return replace(scenario, params=(scenario.params[0], *scenario.params))


def widen_matrices(scenario: Scenario, claims: Claims) -> Scenario:
    """Take shapes that a low rank compresses."""
    wider = _SHORTER_SHAPES if scenario.name in OPTION_SCENARIOS else _WIDER_SHAPES
    shapes = (wider.get(spec.shape, spec.shape) for spec in scenario.params)
    params = tuple(
        replace(spec, shape=shape) for spec, shape in zip(scenario.params, shapes, strict=True)
    )
    return replace(scenario, params=params)


def feed_few_elements(scenario: Scenario, claims: Claims) -> Scenario:
    """Add steps whose gradients lie in a few elements, before those that empty residuals."""
    draw = in_all_parameters if scenario.name == LAYERS.name else in_each_parameter
    own = [kind for kind in scenario.steps if kind not in DRAINING]
    few = draw(scenario, claims.delta)
    return replace(scenario, steps=(*own, *few, *scenario.steps[len(own) :]))


def run_at_two_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    """Run at two ranks."""
    return replace(scenario, world_sizes=(2,))


def run_at_three_ranks(scenario: Scenario, claims: Claims) -> Scenario:
    """Run at three ranks."""
    return replace(scenario, world_sizes=(3,))


def begin_with_warmup(scenario: Scenario, claims: Claims) -> Scenario:
    """Begin with the steps of a claimed warm-up.

    Crafted values are exact in narrower dtypes, too. In scenarios that feed exact hooks random
    values, and in those that are compared with them, the last step of the warm-up has such values.
    The scenarios with one parameter are saved within a warm-up of two steps or more.
    """
    resume = scenario.resume
    # The scales of layers are beyond float16, which crafted values would have to be exact in.
    usual = "training" if claims.warmup_rounded and scenario.name == LAYERS.name else "crafted"
    if scenario.steps[0] == "tiled":
        usual = "tiled"
    last = "normal" if scenario.name in _WITH_RANDOM_VALUES else usual
    if scenario.unrecorded_kind in DRAINING:
        # The warm-up is over before these steps, which must leave nothing behind.
        usual = last = scenario.unrecorded_kind
    steps = (usual,) * (claims.warmup - 1) + (last,) + scenario.steps
    if scenario.name == SPECIAL_FIRST.name:
        steps = put_warm_up_after_overflows(scenario.steps, claims.warmup)
    saves_early = claims.warmup > 1 and scenario.name in _SAVED_EARLY
    if resume.saves_at:
        at = 1 if saves_early else resume.saves_at + claims.warmup
        repeated = resume.rolls_back_at - resume.saves_at
        if saves_early and resume.rolls_back_at:
            repeated += claims.warmup
            steps = ("crafted",) + ("constant",) * (2 * repeated)
        rolls_back_at = at + repeated if resume.rolls_back_at else 0
        resume = replace(resume, saves_at=at, rolls_back_at=rolls_back_at)
    return replace(
        scenario,
        steps=steps,
        rewraps=tuple(at + claims.warmup for at in scenario.rewraps),
        unrecorded_steps=max(scenario.unrecorded_steps, claims.steps_of_warmup - claims.warmup),
        fault=replace(scenario.fault, step=scenario.fault.step + claims.warmup),
        resume=resume,
    )


def start_over(scenario: Scenario, claims: Claims) -> Scenario:
    """Add the first steps again, to be made from the state before them: three after a warm-up."""
    resume = replace(scenario.resume, starts_over_at=len(scenario.steps))
    again = slice(claims.warmup + 3)
    return replace(
        scenario,
        steps=scenario.steps + scenario.steps[again],
        loss_scales=scenario.loss_scales + scenario.loss_scales[again],
        resume=resume,
    )


def is_folded_local(scenario: Scenario, claims: Claims) -> bool:
    """Whether the run is folded, and the claim is about local results."""
    return claims.lossy == LOCAL and scenario.name == NETWORK.name


def count_bytes(scenario: Scenario, claims: Claims) -> Scenario:
    """Record the bytes that are sent."""
    return replace(scenario, observe=replace(scenario.observe, bytes_sent=True))


def is_chained(scenario: Scenario, claims: Claims) -> bool:
    """Whether the subject starts collectives in callbacks."""
    return claims.chained and scenario.kind == VALUES.kind


def is_serialised(scenario: Scenario, claims: Claims) -> bool:
    """Whether collectives have to end one by one."""
    # `raw` has collectives come as they come, and `long` measures memory, and a wait keeps some
    # memory.
    return (
        is_chained(scenario, claims)
        and not scenario.profile.ordered
        and scenario.name != RAW.name
        and not scenario.observe.memory
    )


def is_fused(scenario: Scenario, claims: Claims) -> bool:
    """Whether the subject steps parameters itself in this scenario."""
    return bool(claims.fused and scenario.params) and scenario.name != AT_SCALE.name


def is_lossy(scenario: Scenario, claims: Claims) -> bool:
    """Whether the subject may lose a part of this scenario."""
    has_results = bool(scenario.params) and scenario.observe.gradients
    return bool(claims.lossy) and has_results and scenario.name != AT_SCALE.name


def is_long(scenario: Scenario, claims: Claims) -> bool:
    """Whether the scenario is long, and the subject lossy."""
    return is_lossy(scenario, claims) and scenario.name in LONG_SCENARIOS


def lacks_random_values(scenario: Scenario, claims: Claims) -> bool:
    """Whether a lossy subject would have nothing to lose at first."""
    lossy_at_once = scenario.name in LONG_SCENARIOS or scenario.delayed
    return (
        is_lossy(scenario, claims)
        and bool(claims.warmup)
        and lossy_at_once
        and not {"normal", "training"} & set(scenario.steps)
    )
