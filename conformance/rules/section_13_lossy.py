"""Section 13: hooks whose result is not the mean, or that step the parameters, too."""

from itertools import combinations

import torch

from conformance.judging.oracles import lossy
from conformance.judging.oracles import mean as oracle
from conformance.judging.requirements import require_optimizer, require_steps
from conformance.judging.rule import WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import (
    ACCUMULATED,
    BUCKETS,
    DTYPES,
    LIKE,
    ORDERED,
    SHAPES,
    SMALL_GRADIENTS,
    SUBGROUPS,
    VALUES,
)
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
    """Under ``compressed`` the sum of all results is the sum of all means, once zeros have been fed
    until the residual is empty. Under ``compressed(feedback=ef21)`` the result is the mean once the
    same gradients have been fed often enough.

    Each parameter is within 1/16; the number of steps follows from ``delta`` (see
    ``judging/oracles/lossy.py``).
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
    keeps.
    """
    _judge(run, claims, found, CONTRACTION)


@rule(
    "13.3",
    "Gives random results whose expectation is the mean",
    on=(VALUES,),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="Alistarh et al., QSGD, NeurIPS 2017; Wen et al., TernGrad, NeurIPS 2017",
    remedy="rounding to nearest, a draw that is reused, a scale that is left out; biased results "
    "need feedback",
)
def unbiased(run: Run, claims: Claims, found: Found) -> None:
    """Under ``unbiased`` the errors of 96 draws on the same gradients cancel out, in each of six
    directions.

    The limit is 6 times their root sum of squares plus 12 times the largest. An unbiased hook
    exceeds it with probability below 1e-5, and then in every run or in none (see
    ``judging/oracles/lossy.py``).
    """
    _judge(run, claims, found, UNBIASED)


@rule(
    "13.4",
    "Ends the warm-up at exactly its step",
    on=(VALUES, BUCKETS),
    needs=CONTRACT,
    worlds=WorldSizes.PRIMARY,
    judges_lossy_results=True,
    source="torch documentation, PowerSGDState: start_powerSGD_iter; PostLocalSGDState: "
    "start_localSGD_iter",
    remedy="a comparison that is off by one; a count of buckets instead of steps",
)
def warm_up(run: Run, claims: Claims, found: Found) -> None:
    """Under ``warmup(k)`` the first k steps give the exact mean, and the next one does not.

    Under ``local`` all ranks may average for good, so that every step gives the mean: if any step
    differs, then the first one after the warm-up must.
    """
    if not claims.warmup:
        found.does_not_apply()
        return
    exact = Claims(world_only=claims.world_only)
    if not require_steps(run, exact, found, list(range(claims.warmup))):
        return
    steps = range(claims.warmup, len(run.scenario.steps))
    first = next((step for step in steps if lossy.differs(run, step, claims)), None)
    is_local_mean = first is None and claims.lossy == LOCAL
    actual = "the mean, up to rounding"
    if first is not None:
        actual += f"; step {first} is the first that differs"
    found.require(
        first == claims.warmup or is_local_mean,
        f"another result than the mean in step {claims.warmup}, the first after the warm-up",
        actual,
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
    on=(VALUES, BUCKETS, DTYPES, SHAPES, SUBGROUPS, ACCUMULATED),
    needs=(*CONTRACT, "2.1", "13.1", "13.2", "13.3", "13.5"),
    source="torch documentation, torch.optim; DistributedDataParallel._register_fused_optim",
    remedy="a step before the gradient is reduced, or with bucket.buffer() instead of the result; "
    "a step left out or taken twice",
)
def fused(run: Run, claims: Claims, found: Found) -> None:
    """Under ``fused(...)`` the parameters are, after every step, those that the named optimizer of
    torch.optim makes of the reduced gradients. In the first ``after`` steps they are left alone.

    The bound is 64 units in the last place of the sum of all changes, because the hook may take
    operations in another order.
    """
    if not claims.fused:
        found.does_not_apply()
        return
    require_optimizer(run, claims, found)


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
    for rank, step, collectives, gradients in run.bytes_sent(max(2, claims.warmup)):
        total = sum(size for _, size in collectives)
        # Certificates are compared by the traffic, also without the claim.
        found.sends(total, gradients)
        if claims.ratio is None:
            continue
        largest = sorted(collectives, key=lambda one: -one[1])[:3]
        names = ", ".join(f"{name} {size}" for name, size in largest)
        found.require(
            total <= claims.ratio * gradients,
            f"at most {claims.ratio:g} of {gradients} bytes",
            f"rank {rank}, step {step}: {total} bytes, {total / gradients:.3g} of them; {names}",
        )


@rule(
    "13.8",
    "Resembles the reference that it claims to be like",
    on=(LIKE,),
    owns=(LIKE,),
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
    same ones, results have the same length and the same distance from the mean as the reference's.

    A subject that draws random numbers is one more run of the reference: its distance is
    distributed as those of three pairs of runs, of which the largest is doubled, and the same holds
    for lengths. For a subject without random numbers the slack is a 256th of the mean's length, a
    level of eight bits, because roundings decide between levels; and a 64th of the lengths. Smaller
    differences pass, such as whether PowerSGD with feedback begins with the factors of the step
    before; without feedback that difference is found.
    """
    subject = next(iter(runs.values()))
    kinds = subject.scenario.steps[claims.warmup :]
    for rank in range(subject.world):
        lengths = {kind: torch.zeros(len(runs), 2, dtype=torch.float64) for kind in kinds}
        for step, kind in enumerate(subject.scenario.steps):
            step_lengths = _require_near_reference(runs, rank, step, found)
            if step_lengths is None:
                return
            if step >= claims.warmup:
                lengths[kind] += step_lengths
        if not all(_require_lengths(rank, kind, sums, found) for kind, sums in lengths.items()):
            return


def _require_near_reference(
    runs: dict[str, Run], rank: int, step: int, found: Found
) -> torch.Tensor | None:
    """Require the subject's result to be near the reference's, the first of ``runs`` after its own.

    Returns:
        For each run the length of its result, and the result's distance from the mean; None if the
        requirement does not hold.
    """
    subject = next(iter(runs.values()))
    place = f"rank {rank}, step {step}"
    all_results = [lossy.whole_result(run, rank, step) for run in runs.values()]
    results = [got for got in all_results if got is not None]
    complete = len(results) == len(runs)
    if not found.require(complete, "a gradient", f"{place}: a parameter has none"):
        return None
    indices = range(len(subject.scenario.params))
    mean = torch.cat([oracle.mean(subject, rank, step, index) for index in indices])
    distances = [float((one - other).norm()) for one, other in combinations(results[1:], 2)]
    bound = 2 * max(distances, default=0.0) + float(mean.norm()) / 256
    off = float((results[0] - results[1]).norm())
    expected = f"a result within {bound:.3g} of the reference's"
    if not found.require(off <= bound, expected, f"{place}: {off:.3g} away"):
        return None
    found.checked(len(mean), off / bound)
    return torch.tensor(
        [(float(result.norm()), float((result - mean).norm())) for result in results]
    )


def _require_lengths(rank: int, kind: str, sums: torch.Tensor, found: Found) -> bool:
    """Require the subject's lengths and distances, ``[runs, 2]``, to be near the references'."""
    names = ("long", "from the mean")
    for name, (got, *theirs) in zip(names, sums.t().tolist(), strict=True):
        low = min(theirs)
        high = max(theirs)
        slack = 2 * (high - low) + high / 64
        holds = found.require(
            low - slack <= got <= high + slack,
            f"results of {kind} gradients {low:.4g} to {high:.4g} {name}, as the reference's, "
            f"or {slack:.3g} more or less",
            f"rank {rank}: {got:.4g}",
        )
        if not holds:
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
