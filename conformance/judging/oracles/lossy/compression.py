"""Judge compressed results: with feedback, by differences (EF21), and without feedback.

The derivations stand in the package's docstring.
"""

import math
from collections.abc import Sequence
from itertools import product

import torch

from conformance.judging.oracles.lossy.common import (
    LIMIT,
    ROUNDINGS,
    JudgedRun,
    likely_cause,
    unit_roundoff,
)
from conformance.scenarios.values import LAYERS

SLOWER = 4  # times slower than signs with one scale, see "Slow compressors"
STILL_LEFT = 1 / 4  # of ordinary gradients, at most, in a slow compressor's residual


def require_sum_of_means(judged: JudgedRun, steps: range, ranks: Sequence[int] = ()) -> None:
    """Require the results of all steps to sum to the means, for compression with feedback.

    A rank that runs out of inputs leaves before residuals are empty. It gets the same bits as a
    rank that stays (``same_bits``), and is judged by those. If DDP is made anew, a hook may forget
    its residuals once: the sum is right from some DDP on.
    """
    scenario = judged.run.scenario
    fed = sum(not scenario.steps[step].endswith("faint") for step in steps)
    begins = [steps, *(range(at, steps.stop) for at in scenario.rewraps)]
    for rank, index, place in judged.parameters(*ranks):
        if not judged.trains_throughout(rank):
            continue
        got = judged.results(rank, index, steps)
        if got is None:
            return
        means = torch.stack([judged.mean(rank, step, index) for step in steps])
        off, missing = math.inf, means[0]
        for later in begins:
            rest = (means - got)[later.start - steps.start :].sum(0)
            share = float(rest.norm()) / judged.fed_norm(rank, later, [index])
            if share < off:
                off, missing = share, rest
        total, means = got.sum(0), means.sum(0)
        cause = ""
        may_be_left = off < STILL_LEFT or scenario.name == LAYERS.name
        if off > LIMIT and may_be_left:
            members = judged.bucket_members(rank, steps[-1], index)
            numel = sum(math.prod(scenario.params[member].shape) for member in members)
            if _still_comes_out(missing, got, fed, numel):
                judged.found.checked(total.numel())
                continue
        if off > LIMIT:
            own = torch.stack([judged.run.fed(rank, step, index) for step in steps]).sum(0)
            cause = likely_cause(total, means, own, len(judged.group(rank)), feedback=True)
        holds = judged.found.require(
            off <= LIMIT,
            f"results that add up to the sum of the means, within {LIMIT:g} of the norm of the "
            f"gradients, over {fed} steps and {len(steps) - fed} more with gradients near zero, in "
            "which residuals come out",
            f"{place}: the sum of the results is off by {off:.3g} of the norm of the gradients",
            cause,
        )
        if not holds:
            return
        judged.found.checked(total.numel(), off / LIMIT)


def _still_comes_out(missing: torch.Tensor, got: torch.Tensor, fed: int, numel: int) -> bool:
    """Whether the largest missing elements come out at the pace of signs with one scale, in the
    second half of the steps of faint gradients.

    In their first half the rest of a value comes out of which a part was lost. Nothing is known of
    a run without faint gradients: it returns False.

    Args:
        missing: the sum of the means, less that of the results, from the same step on.
        got: the results, ``[steps, numel]``.
        fed: the number of steps before those of faint gradients.
        numel: the number of elements of the bucket, which may have one scale.
    """
    if fed == len(got):
        return False
    large = missing.abs() >= missing.abs().max() / 2
    begin = fed + (len(got) - fed) // 2
    came_out = got[begin:, large].sum(0) * missing[large].sign()
    pace = missing[large].abs() / (SLOWER * numel)
    return bool((came_out >= (len(got) - begin) * pace).all())


def require_drained(judged: JudgedRun, steps: range) -> None:
    """Require next to nothing as the result of the last of ``steps``, which feed faint gradients
    after a step of ordinary ones: else something is added that is no residual.
    """
    last = steps[-1]
    for rank, index, place in judged.parameters():
        got = judged.results(rank, index, range(last, last + 1))
        if got is None:
            return
        members = judged.bucket_members(rank, last, index)
        fed = judged.fed_norm(rank, [steps.start - 1], members)
        size = float(got.norm()) / fed
        holds = judged.found.require(
            size <= LIMIT,
            f"a result near zero after {len(steps)} steps with gradients near zero: at most "
            f"{LIMIT:g} times the norm of the last ordinary gradients",
            f"{place}: {size:.3g} times that norm",
            "a NaN or an infinity may have changed the state on one rank only, or only a part of it"
            * (size > LIMIT),
        )
        if not holds:
            return
        judged.found.checked(got.numel(), size / LIMIT)


def require_convergence(judged: JudgedRun, last: int, ranks: Sequence[int] = ()) -> None:
    """Require the mean in the last step, after the same gradients again and again."""
    for rank, index, place in judged.parameters(*ranks):
        if not judged.trains_throughout(rank) or not judged.run.receives(rank, last, index):
            continue
        got = judged.results(rank, index, range(last, last + 1))
        if got is None:
            return
        right = judged.mean(rank, last, index)
        off = float((got[0] - right).norm()) / judged.fed_norm(rank, [last], [index])
        cause = ""
        if off > LIMIT:
            own = judged.run.fed(rank, last, index)
            cause = likely_cause(got[0], right, own, len(judged.group(rank)))
        holds = judged.found.require(
            off <= LIMIT,
            f"the mean, within {LIMIT:g}, of gradients that were fed again and again",
            f"{place}: off by {off:.3g}",
            cause,
        )
        if not holds:
            return
        judged.found.checked(right.numel(), off / LIMIT)


def require_contraction(judged: JudgedRun, steps: range) -> None:
    """Require the bound of compression without feedback, of each bucket in each step."""
    for step, rank in product(steps, range(judged.run.world)):
        for call in judged.run.ranks[rank].all("call", step=step):
            members = judged.receiving(rank, step, call)
            if members and not _require_contracted(judged, rank, step, call["index"], members):
                return


def _require_contracted(
    judged: JudgedRun, rank: int, step: int, bucket: int, members: list[int]
) -> bool:
    run = judged.run
    place = f"rank {rank}, step {step}, bucket {bucket}"
    total = judged.bucket_result(rank, step, members, place)
    if total is None:
        return False
    right = torch.cat([judged.mean(rank, step, i) for i in members])
    off = float((total - right).norm())
    share = math.sqrt(1 - judged.claims.delta)
    rounding = ROUNDINGS * max(unit_roundoff(run, i) for i in members)
    bound = (share + rounding) * judged.fed_norm(rank, [step], members)
    holds = off <= bound
    cause = ""
    if not holds:
        own = torch.cat([run.fed(rank, step, i) for i in members])
        cause = likely_cause(total, right, own, len(judged.group(rank)))
    limit = f"sqrt(1 - {judged.claims.delta:g}) ||gradient|| = {bound:.3g}"
    judged.found.require(holds, f"||result - mean|| <= {limit}", f"{place}: {off:.3g}", cause)
    if holds:
        judged.found.checked(total.numel(), off / bound if bound else None)
    return holds


def require_size(judged: JudgedRun, steps: range) -> None:
    """Require results that are finite and no larger than compression explains.

    A few steps prove no more. An element may get the norm of its whole bucket if that is the scale.
    """
    for rank, index, place in judged.parameters():
        got = judged.results(rank, index, steps)
        if got is None:
            return
        norms = (
            judged.fed_norm(rank, [step], judged.bucket_members(rank, step, index))
            for step in steps
        )
        size = float(got.sum(0).norm())
        numel = got.size(1)
        bound = max(2.0, math.sqrt(numel)) * sum(norms)
        expected = f"results of a norm of at most {bound:.3g}"
        if not judged.found.require(size <= bound, expected, f"{place}: {size:.3g}"):
            return
        judged.found.checked(numel)
