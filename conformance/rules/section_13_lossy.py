"""Section 13: hooks whose result is not the mean, or that step the parameters, too."""

from dataclasses import replace

import torch

from conformance.judging.oracles import lossy
from conformance.judging.oracles import mean as oracle
from conformance.judging.oracles.impulses import require_answers
from conformance.judging.oracles.lossy import likeness
from conformance.judging.requirements import (
    require_few_bytes,
    require_optimizer,
    require_same_memory,
    require_warm_up,
    sees_collectives,
)
from conformance.judging.rule import WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import (
    ACCUMULATED,
    BUCKETS,
    COMBINED,
    DTYPES,
    LARGE,
    LIKE,
    ORDERED,
    SHAPES,
    SMALL_GRADIENTS,
    STATIC,
    SUBGROUPS,
    UNEVEN,
    UNUSED,
    VALUES,
    VIEWS,
)
from conformance.scenarios.impulses import IMPULSES
from conformance.scenarios.late_steps import LIKE_LATE
from conformance.scenarios.training_sizes import NETWORK
from conformance.scenarios.values import LAYERS
from conformance.subjects.claims import (
    CONTRACTION,
    DIFFERENCE,
    FEEDBACK,
    LOCAL,
    UNBIASED,
    Claims,
)

CONTRACT = ("1.1", "1.2", "1.5", "1.9")


def _judge(run: Run, claims: Claims, found: Found, *kinds: str) -> None:
    """Judge a subject whose lossy claim is one of ``kinds``."""
    if claims.lossy in kinds:
        lossy.require(run, claims, found)
    else:
        found.does_not_apply()


@rule(
    "13.1",
    "Delivers later the part that compression holds back",
    on=(VALUES,),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019; Stich et al., Sparsified "
    "SGD with Memory, NeurIPS 2018; Richtarik et al., EF21, NeurIPS 2021",
    remedy="the residual: gradient plus residual, minus the values that were sent, not those that "
    "arrived; kept per parameter, across buckets; and the divisor. Without a residual, claim "
    "compressed(feedback=False, delta=...); if the rest still shrinks, as with signs and one scale "
    "for a bucket, claim a smaller delta",
)
def held_back_comes_out(run: Run, claims: Claims, found: Found) -> None:
    """Under ``compressed`` the sum of all results is the sum of all means, once faint gradients
    have been fed until the residual is empty. Under ``compressed(feedback=ef21)`` the result is
    the mean once the same gradients have been fed often enough. All ranks get the same bits.

    Each parameter is within 1/16; the number of steps follows from ``delta`` (see
    ``judging/oracles/lossy``).
    """
    _judge(run, claims, found, FEEDBACK, DIFFERENCE)


@rule(
    "13.2",
    "Loses no more than its delta allows",
    on=(VALUES,),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, assumption A: a "
    "delta-compressor",
    remedy="scales and zero points, the range of a quantizer, the divisor; if the loss is meant, "
    "claim a smaller delta",
)
def contraction(run: Run, claims: Claims, found: Found) -> None:
    """Under ``compressed(feedback=False, delta=d)`` each bucket's result is within sqrt(1 - d)
    times the norm of the gradients of their mean.

    The bound holds in every step, while papers bound the expectation: claim a delta that each draw
    keeps. In some steps the gradients lie in a few elements alone: the last or the first of a
    parameter, or drawn ones.
    """
    _judge(run, claims, found, CONTRACTION)


@rule(
    "13.3",
    "Gives random results whose expectation is the mean",
    on=(VALUES, BUCKETS),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="Alistarh et al., QSGD, NeurIPS 2017; Wen et al., TernGrad, NeurIPS 2017",
    remedy="rounding to nearest, a draw that is reused, a scale that is left out; too few random "
    "bits; biased results need feedback",
)
def unbiased(run: Run, claims: Claims, found: Found) -> None:
    """Under ``unbiased`` the errors of 96 draws or more, on the same gradients, cancel out in each
    of six directions.

    The limit is 6 times their root sum of squares plus 12 times the largest. An unbiased hook
    exceeds it with probability below 1e-5, and then in every run or in none (see
    ``judging/oracles/lossy``). An element that all ranks feed with the same sign is sent at least
    once if elements that are no larger are sent in a third of the draws. In ``buckets`` elements
    are 2**-4 to 2**-15 of the largest: those of each octave are right on average.
    """
    if run.scenario.name == BUCKETS.name and claims.lossy == UNBIASED:
        lossy.require_small_elements(run, claims, found)
    else:
        _judge(run, claims, found, UNBIASED)


@rule(
    "13.4",
    "Ends the warm-up at exactly its step",
    on=(VALUES, BUCKETS, NETWORK),
    if_inexact=(NETWORK,),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="torch documentation, PowerSGDState: start_powerSGD_iter; PostLocalSGDState: "
    "start_localSGD_iter",
    remedy="a comparison that is off by one; a count of buckets instead of steps; if values are "
    "rounded in the warm-up on purpose, claim warmup(k, rounded=bfloat16) or float16",
)
def warm_up(run: Run, claims: Claims, found: Found) -> None:
    """Under ``warmup(k)`` the first k steps give the exact mean, and the next one does not. The
    last exact step feeds random values, which no narrower dtype holds. Under ``rounded=`` the first
    k steps give the mean of rounded values, and that last one shows that they are rounded.

    Under ``local`` all ranks may average for good, and a hook may compress large buckets alone, so
    that every step gives the mean: if any step differs, then the first one after the warm-up must.
    Rule 2.10 requires that some step differs in some run.
    """
    if not claims.warmup:
        found.does_not_apply()
        return
    if not require_warm_up(run, claims, found):
        return
    strict = replace(claims.of_warmup, rounded=None)
    random = [step for step in run.steps("normal") if step < claims.warmup]
    if claims.warmup_rounded and random:
        found.require(
            any(oracle.compare(run, step, strict).mismatch for step in random),
            f"values rounded to {claims.warmup_rounded} in the warm-up",
            "every element of its random steps is as exact as without rounding",
        )
    steps = range(claims.warmup, len(run.scenario.steps))
    first = next((step for step in steps if lossy.differs(run, step, claims)), None)
    found.require(
        first in (claims.warmup, None),
        f"another result than the mean in step {claims.warmup}, the first after the warm-up",
        f"the mean, up to rounding; step {first} is the first that differs",
    )


@rule(
    "13.5",
    "Gives weighted means if it is local",
    on=(VALUES,),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020; Daily et al., "
    "GossipGraD, 2018; Lian et al., Can Decentralized Algorithms Outperform Centralized "
    "Algorithms?, NeurIPS 2017 (doubly stochastic weights)",
    remedy="a division that is left out, a partner's gradient that is overwritten, a partner that "
    "the ranks do not agree on",
)
def weighted_mean(run: Run, claims: Claims, found: Found) -> None:
    """Under ``local`` each rank's result is a mean of ranks' gradients with weights of its own. The
    weights are not negative, sum to 1, and are the same for every element of a bucket; the rank's
    own gradient is among them; over all ranks each gradient counts once."""
    _judge(run, claims, found, LOCAL)


@rule(
    "13.6",
    "Steps the parameters as its fused optimizer does",
    on=(
        VALUES,
        BUCKETS,
        DTYPES,
        SHAPES,
        LARGE,
        SUBGROUPS,
        UNUSED,
        STATIC,
        ACCUMULATED,
        UNEVEN,
        LAYERS,
        VIEWS,
        COMBINED,
    ),
    refusable=(UNUSED, UNEVEN, COMBINED),
    needs=(*CONTRACT, "2.1", "13.1", "13.2", "13.3", "13.5"),
    source="torch documentation, torch.optim; DistributedDataParallel._register_fused_optim",
    remedy="a step before the gradient is reduced, or with bucket.buffer() instead of the result; "
    "a step left out or taken twice; bucket.gradients() of parameters with other strides: the "
    "views follow the shape, and the buffer follows the strides; momentum that is .grad itself, "
    "which may be a view of the bucket; p.data = ..., in place of an operation on p",
)
def fused(run: Run, claims: Claims, found: Found) -> None:
    """Under ``fused(...)`` the parameters are, after every step, those that the named optimizer of
    torch.optim makes of the reduced gradients. In the first ``after`` steps they are left alone.

    They stay in their memory, which others may share (share_memory_, flat buffers, averages, CUDA
    graphs), but for the first two steps that the hook takes, in which it may lay out parameters.

    The bound is 64 units in the last place of the sum of all changes, because the hook may take
    operations in another order. Layers whose gradients are 2**-25 and 2**-24 show an optimizer's
    epsilon. Parameters in half precision may be stepped in float32: its operations alone, its state
    too, or with a float32 copy of the parameter that is kept; each in the same way in every step.
    Under find_unused_parameters a parameter that no rank has used is either left alone in
    every such step, or stepped with the hook's result in every such step. With a static graph the
    first step may be one later than claimed, if ``after`` is claimed. A hook may refuse unused
    parameters, also beside gradients that are views of the buckets, and ranks without inputs, with
    an error on every rank.
    """
    if not claims.fused:
        found.does_not_apply()
        return
    require_optimizer(run, claims, found)
    require_same_memory(run, found, claims.after)


@rule(
    "13.7",
    "Sends no more than it claims",
    on=(ORDERED,),
    needs=(*CONTRACT, "1.6"),
    source="rule book; a compressor that sends everything is slower than none",
    remedy="indices in int64, values in a wider dtype, padding, a second collective that was "
    "forgotten",
)
def bytes_sent(run: Run, claims: Claims, found: Found) -> None:
    """Under ``ratio=r`` the bytes that a rank gives to collectives in a step are at most r times
    those of its gradients.

    The rule judges steps after the warm-up, when DDP has regrouped its buckets. Every collective of
    the process counts.
    """
    if claims.ratio is None:
        found.does_not_apply()
    elif not sees_collectives([run], claims, found):
        return
    require_few_bytes(run, claims, found)


@rule(
    "13.8",
    "Resembles the reference that it claims to be like",
    on=(LIKE, LIKE_LATE),
    owns=(LIKE, LIKE_LATE),
    claimed="like",
    baseline="like",
    reads_all_runs=True,
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    since="1.3",
    source="hooks_ref, and the papers that its docstrings name",
    remedy="another rank, ratio, block or scale than the claim declares; feedback that is left "
    "out, or taken too early",
)
def like(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under ``like(reference)`` no step's result is further from the reference's than twice the
    distance between its runs with other seeds. Over all steps on new gradients, and over all on the
    same ones, results have the same length and the same distance from the mean as the reference's;
    and so have those of 12 steps after 1,000 to 1,200 others.

    A subject that draws random numbers is one more run of the reference: its distance is
    distributed as those of three pairs of runs, of which the largest is doubled, and the same holds
    for lengths. For a subject without random numbers the slack is a 256th of the mean's length, a
    level of eight bits, because roundings decide between levels; and a 64th of the lengths. Smaller
    differences pass, such as whether PowerSGD with feedback begins with the factors of the step
    before; without feedback that difference is found.
    """
    for scenario in (LIKE, LIKE_LATE):
        of_scenario = {
            name: run for name, run in runs.items() if run.scenario.name == scenario.name
        }
        if not _require_like(of_scenario, claims, found):
            return


def _require_like(runs: dict[str, Run], claims: Claims, found: Found) -> bool:
    """Require the first of some runs to be like the others."""
    subject = next(iter(runs.values()))
    kinds = subject.scenario.steps[claims.warmup :]
    for rank in range(subject.world):
        lengths = {kind: torch.zeros(len(runs), 2, dtype=torch.float64) for kind in kinds}
        for step, kind in enumerate(subject.scenario.steps):
            step_lengths = likeness.require_near_reference(runs, rank, step, found)
            if step_lengths is None:
                return False
            if step >= claims.warmup:
                lengths[kind] += step_lengths
        if not all(
            likeness.require_lengths(rank, kind, sums, found) for kind, sums in lengths.items()
        ):
            return False
    return True


@rule(
    "13.9",
    "Frees the gradients that it claims to free",
    on=(VALUES, BUCKETS, ACCUMULATED),
    claimed="frees_gradients",
    needs=(*CONTRACT, "13.6"),
    since="1.5",
    source="torch.distributed.optim._apply_optimizer_in_backward: memory of the gradients is free "
    "before the next forward",
    remedy="gradients that DDP writes after every hook is done: free them in a callback of the "
    "engine that is queued after its own",
)
def frees_gradients(run: Run, claims: Claims, found: Found) -> None:
    """Under ``fused(..., frees_gradients=True)`` no parameter that is stepped has a gradient when
    backward is over."""
    for rank in run.ranks:
        for step in range(claims.after, len(run.scenario.steps)):
            for index in range(len(run.scenario.params)):
                name = run.parameter_name(index)
                is_kept = f"{step}/grad/{name}" in rank.tensors
                place = f"rank {rank.rank}, step {step}, parameter {name}"
                found.require(not is_kept, "no gradient", f"{place}: a gradient is there")


@rule(
    "13.10",
    "Treats small gradients as large ones",
    on=(SMALL_GRADIENTS,),
    owns=(SMALL_GRADIENTS,),
    claimed="lossy",
    needs=(*CONTRACT, "13.1", "13.2", "13.3", "13.5"),
    since="1.5",
    source="Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, assumption A holds for "
    "every length of x; rule book",
    remedy="a threshold, a range or an epsilon that is an absolute number: derive it from the "
    "gradient, or choose it far below any gradient",
)
def small_gradients(run: Run, claims: Claims, found: Found) -> None:
    """Under a lossy claim, the requirements on random gradients (13.1, 13.2, 13.3, 13.5) hold for
    gradients a thousandth as large, too."""
    lossy.require(run, claims, found)


@rule(
    "13.11",
    "Mixes the gradients of all ranks if it is local",
    on=(VALUES, BUCKETS),
    claimed="mixes",
    needs=("13.5",),
    since="1.6",
    source="Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS "
    "2017, assumption 1 (a spectral gap: the graph is connected); Koloskova et al., A Unified "
    "Theory of Decentralized SGD, ICML 2020",
    remedy="a partner that never changes, a bucket that is never sent, a schedule that is counted "
    "in buckets. If the trainer averages the parameters, claim local(mixing=False), or "
    "local(ratio=0) if the hook sends nothing",
)
def mixes(run: Run, claims: Claims, found: Found) -> None:
    """Under ``local`` the gradients of all ranks of a group meet: within 24 steps, each parameter's
    weights connect every rank with every other one, directly or through others.

    Ranks that never meet train models of their own. A hook that calls no collective is among them.
    """
    lossy.require_mixing(run, claims, found)


@rule(
    "13.12",
    "Gives the mean over all ranks at its period",
    on=(VALUES,),
    claimed="period",
    needs=("13.5",),
    since="1.6",
    source="Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020 (hierarchical)",
    remedy="a count of calls instead of steps; a period that begins anew in each bucket",
)
def period(run: Run, claims: Claims, found: Found) -> None:
    """Under ``local(period=k)`` every parameter gets the mean over all ranks of its group in at
    least one of any k successive steps after the warm-up."""
    lossy.require_period(run, claims, found)


@rule(
    "13.17",
    "Delivers a part of each gradient at once",
    on=(IMPULSES,),
    owns=(IMPULSES,),
    claimed="holds_back",
    needs=(*CONTRACT, "13.1"),
    since="2.0",
    source="Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, assumption A: what is "
    "kept of a gradient and the residual is less than they are, in every step",
    remedy="a queue of results that is read at its other end, a buffer that is filled after it is "
    "read; a result that is extrapolated from the one before",
)
def at_once(run: Run, claims: Claims, found: Found) -> None:
    """Under ``compressed`` a part of each gradient is in the result of its own step, and no more
    than the gradient comes out, but for what compression adds.

    All ranks feed the same gradients in the first step after the warm-up. Once faint gradients have
    been fed until the residual is empty, one rank alone feeds each parameter, which has a bucket of
    its own. Of their squares an eighth of ``delta`` has to come out at least: of the model in the
    first step, and in the last one of each parameter with 128 / ``delta`` elements or more; of
    smaller ones together, if they have as many; and of the model, if none has. Sums of results do
    not show a result that is a step late, since the gradient comes out in the end: to the optimizer
    it is a gradient of other parameters.
    """
    if claims.lossy == DIFFERENCE:
        found.does_not_apply("results are estimates: each is judged by its distance from the mean")
        return
    require_answers(run, claims, found)
