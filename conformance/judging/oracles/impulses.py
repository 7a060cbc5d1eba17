"""Judge whether a hook with feedback answers a gradient in the gradient's own step.

A rank compresses p = x + e, and keeps e' = p - C(p), with ||e'||**2 <= (1 - delta) ||p||**2. If all
ranks feed the same x, or one rank alone feeds any, and e is as good as empty, then so it is for the
means over the ranks: with m the mean, y the result and E = sum(m) - sum(y) of all steps before,

    ||E + m - y||**2 <= (1 - delta) ||E + m||**2

A hook that returns the result of an earlier step has y = 0 here: nothing of m comes out. One that
extrapolates, y = c + b (c - c_before), overshoots by b c. In steps between others neither shows: a
delay of d steps leaves d of the d + 1 gradients that are held back, which delta = 0.1 allows up to
d = 9. An eighth of delta has to come out, since compressors keep their delta on average, and not in
each step.

In the first step after the warm-up squares are of the whole model, which may be one bucket. In the
last one each parameter has a bucket, and squares are of the parameter; of those with few elements
they are of all together. A selection of the share delta, at random, sends some 128 of
``ENOUGH / delta`` elements, with a deviation of 15 % of their squares; fewer elements are not
judged, unless delta is so small that the whole model has no more: then squares are of the model.
"""

import torch

from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.impulses import ALONE, SHARED
from conformance.subjects.claims import Claims

LEAST = 1 / 8  # of delta
ENOUGH = 128  # elements that a selection of the share delta sends

Tensors = list[torch.Tensor]


def require_answers(run: Run, claims: Claims, found: Found) -> None:
    """Require that a part of each impulse comes out in its own step, on every rank."""
    for rank in range(run.world):
        held = [torch.zeros(()) for _ in run.scenario.params]
        for step in range(claims.warmup, len(run.scenario.steps)):
            right, got = _means(run, rank, step, claims), _results(run, rank, step)
            place = f"rank {rank}, step {step}"
            if not found.require(got is not None, "finite gradients", f"{place}: not finite"):
                return
            assert got is not None
            whole = [before + one for before, one in zip(held, right, strict=True)]
            held = [one - result for one, result in zip(whole, got, strict=True)]
            for name, indices in _judged_together(run, step, claims.delta):
                of = f"{place}, {name}"
                if not _require_share(held, whole, indices, of, claims.delta * LEAST, found):
                    return


def _judged_together(run: Run, step: int, delta: float) -> list[tuple[str, list[int]]]:
    """Return names and indices of the parameters whose squares are judged together in a step."""
    every = list(range(len(run.scenario.params)))
    kind = run.scenario.steps[step]
    whole = [("all parameters", every)]
    if kind == SHARED:
        return whole
    if kind != ALONE:
        return []
    sizes = [torch.Size(spec.shape).numel() for spec in run.scenario.params]
    large = [index for index in every if sizes[index] * delta >= ENOUGH]
    small = [index for index in every if index not in large]
    judged = [(f"parameter {run.parameter_name(index)}", [index]) for index in large]
    if sum(sizes[index] for index in small) * delta >= ENOUGH:
        judged.append(("small parameters", small))
    return judged or whole


def _require_share(
    held: Tensors, whole: Tensors, indices: list[int], place: str, least: float, found: Found
) -> bool:
    """Require that a share of the squares comes out.

    Args:
        held: by parameter, gradients and residuals that are left after the step.
        whole: those before it.
        indices: of the parameters.
        place: the rank, the step and the parameters, in words.
        least: the share.
    """
    left, before = (sum(float(of[i].square().sum()) for i in indices) for of in (held, whole))
    share = 1 - left / before
    actual = f"{place}: by {max(share, 0.0):.3g} of it"
    cause = (
        "the result hardly contains the gradient of its own step: it may be the result of an "
        "earlier step"
    )
    if share < -least:
        actual = f"{place}: the result raises it, to {1 - share:.3g} times its value"
        cause = "the result overshoots: more than the gradient and the residual come out"
    expected = (
        "a result that lowers the squared norm of gradient plus residual, in the gradient's own "
        f"step, by at least {least:.3g} of it (an eighth of delta)"
    )
    holds = found.require(share >= least, expected, actual, cause)
    if holds:
        found.checked(sum(whole[i].numel() for i in indices), least / share)
    return holds


def _means(run: Run, rank: int, step: int, claims: Claims) -> Tensors:
    group = tuple(range(run.world)) if claims.world_only else run.group(rank)
    return [mean(run, rank, step, index, group) for index in range(len(run.scenario.params))]


def _results(run: Run, rank: int, step: int) -> Tensors | None:
    """Return the results of a step in float64; None if one is missing or not finite."""
    results = [run.got(rank, step, index) for index in range(len(run.scenario.params))]
    found = [one.double() for one in results if one is not None]
    if len(found) < len(results) or not all(one.isfinite().all() for one in found):
        return None
    return found
