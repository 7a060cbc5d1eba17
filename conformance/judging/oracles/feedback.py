"""Judge whether a hook with feedback delivers all that it held back, in units without a loss scale.

Let x_r(t) be the gradient that rank r feeds for a parameter in step t, m(t) the mean, y(t) the
gradient that DDP leaves, and s(t) the loss scale of the step, which x_r(t) is multiplied by. The
optimizer takes y(t) / s(t). Over all steps after the warm-up

    || sum_t y(t) / s(t) - sum_t m(t) / s(t) || <= L sqrt(sum_t (mean_r ||x_r(t)|| / s(t))**2)

with L = 1/16. A parameter that no rank uses in a step has no y(t): DDP drops the hook's result. The
last steps feed faint gradients until at most 1/256 of a residual is left (``oracles/lossy``): the
residual is seldom larger than a few gradients, so that the rest is below 1/64 of the right side.
Faint gradients are 2**-20 of the others; they are part of the means, and what is held back of them
is far below the limit. With one scale for a bucket, what is left of a parameter is a part of what
is left of the bucket, which has up to eight times as many elements: it is below the root of 8 times
1/64, which is 0.045.

What a mistake costs. A compressor that sends the share delta of its input, in squares, sends
||e|| sqrt(delta) of a residual e in a step whose result is dropped. If the residual is as long as a
gradient, and one step of five drops it, the sum over T steps is off by sqrt(delta T / 5), and the
right side is sqrt(T): the quotient is 0.14 for delta = 0.1, above the limit. A residual that is not
rescaled is wrong by its length times the factor of the loss scale, less 1.

Large parameters. A low rank of r needs as many steps as a matrix has rows, divided by r, to take a
residual out. The sum of a parameter with more than 4,096 elements may therefore be off by L = 4:
while gradients are independent, it is off by about 1 if nothing of them is sent at all. A residual
that is not rescaled is off by its length times 127 or more.

Overflows. A hook may lose its residual e in a step with an infinity, or keep it, with what it was
fed of finite values in that step. A residual is at most as long as all gradients since the warm-up
together, X_0 + X_1 + ..., so that the sum of all later results may be off by as much, too. One in
units of the scale before the overflow is off by its own length times 127 or more.

Estimates. EF21 keeps an estimate h_r of x_r / s, and results are the mean of the estimates. With
q = sqrt(1 - delta), E the length of x_r / s - h_r, and X the largest length of x_r / s in the run,

    E(t) <= q (E(t - 1) + ||x_r(t) - x_r(t - 1)|| / s) <= q (E(t - 1) + 2 X)
    E    <= 2 q X / (1 - q)

which bounds ||y(t) / s(t) - m(t) / s(t)||, too; L X is added for roundings. Estimates in units of
an old loss scale are wrong by the factor less 1, which is 127 or more in the run. A parameter that
no rank uses in a step has no result; whether its estimates follow the zeros or stay as they are,
x_r changes by 2 X at most until it is used again, and the bound is the same.
"""

import math
from collections.abc import Sequence

import torch

from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.subjects.claims import Claims

LIMIT = 1 / 16
LIMIT_IF_LARGE = 4.0
LARGE = 4096  # elements


def require_all_delivered(run: Run, claims: Claims, found: Found, cause: str) -> None:
    """Require the sum of a parameter's gradients to be the sum of the means, on every rank.

    Args:
        run: the run.
        claims: the claims.
        found: the findings of the rule.
        cause: the known mistake.
    """
    for rank in sorted({*range(run.world)} - {*run.scenario.idle}):
        for index in range(len(run.scenario.params)):
            if not _require_delivered(run, claims, found, rank, index, cause):
                return


def require_small_loss(run: Run, claims: Claims, found: Found, cause: str) -> None:
    """Require the same of the steps after an overflow, but for what was held back before it.

    Args:
        run: the run, with one step of infinities.
        claims: the claims.
        found: the findings of the rule.
        cause: the known mistake.
    """
    (overflow,) = run.steps("inf")
    before = range(claims.warmup, overflow + 1)
    for rank in range(run.world):
        lost = sum(_largest(run, rank, step, claims) for step in before)
        for index in range(len(run.scenario.params)):
            if not _require_delivered(
                run, claims, found, rank, index, cause, first=overflow + 1, lost=lost
            ):
                return


def _largest(run: Run, rank: int, step: int, claims: Claims) -> float:
    """Return the largest length of all finite gradients that a rank of a group feeds in a step, in
    units without the loss scale.
    """
    indices = range(len(run.scenario.params))
    lengths = []
    for other in _group(run, rank, claims):
        fed = [run.fed(other, step, index) for index in indices]
        lengths.append(_norm([one[one.isfinite()] for one in fed]))
    return max(lengths) / run.scenario.loss_scale(step)


def require_near_estimates(run: Run, claims: Claims, found: Found, cause: str) -> None:
    """Require results near the mean in every step, for hooks that keep estimates (EF21), see above.

    Args:
        run: the run.
        claims: the claims.
        found: the findings of the rule.
        cause: the known mistake.
    """
    kept = math.sqrt(1 - claims.delta)
    steps = range(claims.warmup, len(run.scenario.steps))
    overflows = run.steps("inf")
    indices = range(len(run.scenario.params))
    for rank in range(run.world):
        group = _group(run, rank, claims)
        largest = max(_largest(run, rank, step, claims) for step in steps)
        bound = (2 * kept / (1 - kept) + LIMIT) * largest
        for step in sorted({*steps} - {*overflows}):
            received = [index for index in indices if run.receives(rank, step, index)]
            results = [run.got(rank, step, index) for index in received]
            right = [mean(run, rank, step, index, group) for index in received]
            off = math.inf
            if all(got is not None for got in results):
                pairs = zip(results, right, strict=True)
                off = _norm([got - one for got, one in pairs if got is not None])
            off /= run.scenario.loss_scale(step)
            place = f"rank {rank}, step {step}"
            expected = f"a result within {bound:.3g} of the mean, in units without the loss scale"
            if not found.require(off <= bound, expected, f"{place}: off by {off:.3g}", cause):
                return
            found.checked(len(received), off / bound)


def _norm(parts: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


def _require_delivered(
    run: Run,
    claims: Claims,
    found: Found,
    rank: int,
    index: int,
    cause: str,
    *,
    first: int = 0,
    lost: float = 0.0,
) -> bool:
    """Require the sum of a parameter's gradients, see above.

    Args:
        first: the first step that counts.
        lost: how much more may be missing, as a length.
    """
    total = torch.zeros(())
    means = torch.zeros(())
    squares = 0.0
    group = _group(run, rank, claims)
    for step in range(max(first, claims.warmup), len(run.scenario.steps)):
        if not run.receives(rank, step, index):
            continue
        got = run.got(rank, step, index)
        place = f"rank {rank}, step {step}, parameter {run.parameter_name(index)}"
        is_finite = got is not None and bool(got.isfinite().all())
        if not found.require(is_finite, "finite gradients", f"{place}: none, or not finite"):
            return False
        assert got is not None
        scale = run.scenario.loss_scale(step)
        total = total + got / scale
        means = means + mean(run, rank, step, index, group) / scale
        squares += (_fed_norm(run, rank, step, index, claims) / scale) ** 2
    off = float((total - means).norm()) / squares**0.5
    limit = LIMIT_IF_LARGE if total.numel() > LARGE else LIMIT
    limit += lost / squares**0.5
    holds = found.require(
        off <= limit,
        f"gradients that sum to the means within {limit:g}, in units without the loss scale",
        f"rank {rank}, parameter {run.parameter_name(index)}: their sum is off by {off:.3g}",
        cause,
    )
    if holds:
        found.checked(total.numel(), off / limit)
    return holds


def _group(run: Run, rank: int, claims: Claims) -> tuple[int, ...]:
    return tuple(range(run.world)) if claims.world_only else run.group(rank)


def _fed_norm(run: Run, rank: int, step: int, index: int, claims: Claims) -> float:
    group = _group(run, rank, claims)
    return sum(float(run.fed(other, step, index).norm()) for other in group) / len(group)
