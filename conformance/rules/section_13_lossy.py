"""Section 13: what a hook must do whose result is not the mean, or is more than that."""

from itertools import combinations

import torch

from conformance.judging.oracles import lossy
from conformance.judging.oracles import mean as oracle
from conformance.judging.requirements import require_optimizer, require_steps
from conformance.judging.rule import WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import ACCUMULATED, BUCKETS, DTYPES, LIKE, ORDERED, SHAPES, SMALL_GRADIENTS, SUBGROUPS, VALUES
from conformance.subjects.claims import CONTRACTION, DIFFERENCE, FEEDBACK, LOCAL, UNBIASED, Claims

CONTRACT = ("1.1", "1.2", "1.5", "1.9")


def _judge(run: Run, claims: Claims, found: Found, *kinds: str) -> None:
    if claims.lossy in kinds:
        lossy.require(run, claims, found)
    else:
        found.does_not_apply()


@rule(
    "13.1",
    "what compression holds back comes out later",
    on=(VALUES,),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019; Stich et al., Sparsified SGD with Memory, NeurIPS 2018; "
    "Richtarik et al., EF21, NeurIPS 2021",
    remedy="the residual: gradient plus residual, minus what was sent and not what arrived; kept per parameter, across buckets; "
    "and the divisor. Without a residual, claim compressed(feedback=False, delta=...); where what is left still shrinks, as of a "
    "sign with one scale for a bucket, a smaller delta",
)
def held_back_comes_out(run: Run, claims: Claims, found: Found) -> None:
    """Under ``compressed`` the sum of all results is the sum of all means, once zeros have been fed until what was held
    back has come out; under ``compressed(feedback=ef21)`` the result is the mean once the same was fed often enough.

    Each parameter is within 1/16; the number of steps follows from ``delta`` (see ``lossy.py``).
    """
    _judge(run, claims, found, FEEDBACK, DIFFERENCE)


@rule(
    "13.2",
    "what compression loses is bounded",
    on=(VALUES,),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, assumption A: a delta-compressor",
    remedy="scales and zero points, the range of a quantizer, the divisor; if the loss is meant, claim a smaller delta",
)
def contraction(run: Run, claims: Claims, found: Found) -> None:
    """Under ``compressed(feedback=False, delta=d)`` each bucket's result is within sqrt(1 - d) times the norm of the
    gradients of their mean.

    In every step, where papers bound the expectation: claim a delta that each draw keeps.
    """
    _judge(run, claims, found, CONTRACTION)


@rule(
    "13.3",
    "random results have the mean as their expectation",
    on=(VALUES,),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="Alistarh et al., QSGD, NeurIPS 2017; Wen et al., TernGrad, NeurIPS 2017",
    remedy="rounding to nearest, a draw that is reused, a scale that is left out; what is biased needs feedback",
)
def unbiased(run: Run, claims: Claims, found: Found) -> None:
    """Under ``unbiased`` the errors of 96 draws on the same gradients cancel out, in each of six directions.

    The limit is 6 times their root sum of squares and 12 times the largest; an unbiased hook misses it with probability
    below 1e-5, and always or never (see ``lossy.py``).
    """
    _judge(run, claims, found, UNBIASED)


@rule(
    "13.4",
    "the warm-up ends at exactly its step",
    on=(VALUES, BUCKETS),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="torch documentation, PowerSGDState: start_powerSGD_iter; PostLocalSGDState: start_localSGD_iter",
    remedy="a comparison that is off by one; a count of buckets instead of steps",
)
def warm_up(run: Run, claims: Claims, found: Found) -> None:
    """Under ``warmup(k)`` the first k steps give the exact mean, and the one after them does not.

    Under ``local`` the mean may be right for good, where all ranks average: then the one after them differs if any does.
    """
    if not claims.warmup:
        found.does_not_apply()
        return
    if require_steps(run, Claims(world_only=claims.world_only), found, list(range(claims.warmup))):
        steps = range(claims.warmup, len(run.scenario.steps))
        first = next((step for step in steps if lossy.differs(run, step, claims)), None)
        ends = first == claims.warmup or (first is None and claims.lossy == LOCAL)
        expected = f"another result than the mean in step {claims.warmup}, the first after the warm-up"
        said = "the mean, to the last bit that can be asked for"
        found.require(ends, expected, said if first is None else f"{said}; step {first} is the first that differs")


@rule(
    "13.5",
    "a local result is a weighted mean",
    on=(VALUES,),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020; Daily et al., GossipGraD, 2018; Lian et al., "
    "Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017 (doubly stochastic weights)",
    remedy="a division that is left out, a partner that is written over, a partner that not every rank agrees on",
)
def weighted_mean(run: Run, claims: Claims, found: Found) -> None:
    """Under ``local`` each rank's result is a mean of ranks' gradients with weights of its own: not negative, summing
    to 1, the same for every element of a bucket, its own gradient among them; over all ranks each gradient counts once."""
    _judge(run, claims, found, LOCAL)


@rule(
    "13.6",
    "a fused optimizer steps as it says",
    on=(VALUES, BUCKETS, DTYPES, SHAPES, SUBGROUPS, ACCUMULATED),
    needs=(*CONTRACT, "2.1", "13.1", "13.2", "13.3", "13.5"),
    source="torch documentation, torch.optim; DistributedDataParallel._register_fused_optim",
    remedy="a step before the gradient is reduced, or with bucket.buffer() instead of the result; a step left out or taken twice",
)
def fused(run: Run, claims: Claims, found: Found) -> None:
    """Under ``fused(...)`` the parameters are, after every step, what the named optimizer of torch.optim makes of the
    reduced gradients; in the first ``after`` steps they are left alone.

    The bound is 64 units in the last place of the sum of all changes: it may take operations in another order.
    """
    if not claims.fused:
        found.does_not_apply()
        return
    require_optimizer(run, claims, found)


@rule(
    "13.7",
    "it sends no more than it says",
    on=(ORDERED,),
    needs=(*CONTRACT, "1.6"),
    source="rule book; a compressor that sends everything is slower than none",
    remedy="indices in int64, values in a wider dtype, padding, a second collective that was forgotten",
)
def bytes_sent(run: Run, claims: Claims, found: Found) -> None:
    """Under ``ratio=r`` the bytes that a rank gives to collectives in a step are at most r times those of its gradients.

    Judged after the warm-up, when DDP has regrouped its buckets; every collective of the process counts.
    """
    if claims.ratio is None:
        found.does_not_apply()
    for rank, step, collectives, gradients in run.bytes_sent(max(2, claims.warmup)):
        total = sum(size for _, size in collectives)
        found.sends(total, gradients)  # with or without the claim: certificates are compared by it
        if claims.ratio is None:
            continue
        most = ", ".join(f"{name} {size}" for name, size in sorted(collectives, key=lambda one: -one[1])[:3])
        found.require(
            total <= claims.ratio * gradients,
            f"at most {claims.ratio:g} of {gradients} bytes",
            f"rank {rank}, step {step}: {total} bytes, {total / gradients:.3g} of them; {most}",
        )


@rule(
    "13.8",
    "gives what the reference gives that it is like",
    on=(LIKE,),
    owns=(LIKE,),
    claimed="like",
    baseline="like",
    reads_all_runs=True,
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    since="1.3",
    source="hooks_ref, and the papers that its docstrings name",
    remedy="another rank, ratio, block or scale than the claim says; feedback that is left out, or taken too early",
)
def like(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under ``like(reference)`` no step's result is further from the reference's than twice as far as its runs with other
    seeds are from each other; and over all steps on new gradients, and over all on the same ones, results are as long, and
    as far from the mean, as theirs are.

    A subject that draws is one run more of the reference: its distance is drawn as those of three pairs of runs are, of which the
    largest is doubled, and so for lengths. For one that does not draw, a 256th of the mean's length is left, a level of eight
    bits, since roundings decide between levels; and a 64th of the lengths. What makes less of a difference passes, such as
    whether PowerSGD with feedback begins with the factors of the step before; without feedback that is seen.
    """
    subject = next(iter(runs.values()))
    scenario = subject.scenario
    for rank in range(subject.world):
        lengths = {kind: torch.zeros(len(runs), 2, dtype=torch.float64) for kind in scenario.steps[claims.warmup :]}
        for step, kind in enumerate(scenario.steps):
            where = f"rank {rank}, step {step}"
            results = [got for run in runs.values() if (got := lossy.whole_result(run, rank, step)) is not None]
            if not found.require(len(results) == len(runs), "a gradient", f"{where}: a parameter has none"):
                return
            mean = torch.cat([oracle.mean(subject, rank, step, index) for index in range(len(scenario.params))])
            spread = max((float((one - other).norm()) for one, other in combinations(results[1:], 2)), default=0.0)
            bound, off = 2 * spread + float(mean.norm()) / 256, float((results[0] - results[1]).norm())
            if not found.require(off <= bound, f"a result within {bound:.3g} of the reference's", f"{where}: {off:.3g} away"):
                return
            found.checked(len(mean), off / bound)
            if step >= claims.warmup:
                lengths[kind] += torch.tensor([(float(result.norm()), float((result - mean).norm())) for result in results])
        for kind, both in lengths.items():
            for what, (got, *theirs) in zip(("long", "from the mean"), both.t().tolist(), strict=True):
                low, high = min(theirs), max(theirs)
                slack = 2 * (high - low) + high / 64
                expected = f"results of {kind} gradients {low:.4g} to {high:.4g} {what}, as the reference's, or {slack:.3g} more or less"
                if not found.require(low - slack <= got <= high + slack, expected, f"rank {rank}: {got:.4g}"):
                    return


@rule(
    "13.9",
    "gradients that it says it frees are gone",
    on=(VALUES, BUCKETS, ACCUMULATED),
    claimed="frees_gradients",
    needs=(*CONTRACT, "13.6"),
    since="1.5",
    source="torch.distributed.optim._apply_optimizer_in_backward: memory of the gradients is free before the next forward",
    remedy="DDP writes gradients after every hook is done: free them in a callback of the engine that is queued after its own",
)
def frees_gradients(run: Run, claims: Claims, found: Found) -> None:
    """Under ``fused(..., frees_gradients=True)`` no parameter that is stepped has a gradient when backward is over."""
    for rank in run.ranks:
        for step in range(claims.after, len(run.scenario.steps)):
            for index in range(len(run.scenario.params)):
                name = run.parameter_name(index)
                kept = f"{step}/grad/{name}" in rank.tensors
                found.require(not kept, "no gradient", f"rank {rank.rank}, step {step}, parameter {name}: a gradient is there")


@rule(
    "13.10",
    "small gradients are treated as large ones",
    on=(SMALL_GRADIENTS,),
    owns=(SMALL_GRADIENTS,),
    claimed="lossy",
    needs=(*CONTRACT, "13.1", "13.2", "13.3", "13.5"),
    since="1.5",
    source="Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, assumption A holds for every length of x; rule book",
    remedy="a threshold, a range or an epsilon that is a number of its own: take it from the gradient, or far below any",
)
def small_gradients(run: Run, claims: Claims, found: Found) -> None:
    """Under a lossy claim, what holds of random gradients (13.1, 13.2, 13.3, 13.5) holds of those a thousandth as large too."""
    lossy.require(run, claims, found)
