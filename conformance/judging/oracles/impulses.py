"""Judge whether a hook with feedback answers a gradient in the gradient's own step.

A rank compresses p = x + e, and keeps e' = p - C(p), with ||e'||**2 <= (1 - delta) ||p||**2. If all
ranks feed the same x, and e is as good as empty, then so it is for the means over the ranks: with m
the mean, y the result and E = sum(m) - sum(y) of all steps before,

    ||E + m - y||**2 <= (1 - delta) ||E + m||**2

A hook that returns the result of an earlier step has y = 0 here: nothing of m comes out. One that
extrapolates, y = c + b (c - c_before), overshoots by b c. In steps between others neither shows: a
delay of d steps leaves d of the d + 1 gradients that are held back, which delta = 0.1 allows up to
d = 9. An eighth of delta has to come out, since compressors keep their delta on average, and not in
each step. Squares are of the whole model, as a compressor may send little of a single parameter.
"""

import torch

from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.impulses import IMPULSE
from conformance.subjects.claims import Claims

LEAST = 1 / 8  # of delta


def require_answers(run: Run, claims: Claims, found: Found) -> None:
    """Require that a part of each impulse comes out in its own step, on every rank."""
    least = claims.delta * LEAST
    for rank in range(run.world):
        held = torch.zeros(())
        for step in range(claims.warmup, len(run.scenario.steps)):
            right, got = _means(run, rank, step, claims), _results(run, rank, step)
            place = f"rank {rank}, step {step}"
            if not found.require(got is not None, "finite gradients", f"{place}: not finite"):
                return
            assert got is not None
            whole = held + right
            held = whole - got
            if run.scenario.steps[step] != IMPULSE:
                continue
            share = 1 - float(held.square().sum() / whole.square().sum())
            actual = f"{place}: {max(share, 0.0):.3g} of them"
            cause = "the result belongs to other steps: one is missing that holds this gradient"
            if share < -least:
                actual = f"{place}: the result leaves {1 - share:.3g} times as much"
                cause = "the result overshoots: more than the gradient and the residual come out"
            expected = (
                f"a share of {least:.3g}, an eighth of delta, of gradients and residuals in the "
                "step in which they are fed, in squares"
            )
            if not found.require(share >= least, expected, actual, cause):
                return
            found.checked(got.numel(), least / share)


def _means(run: Run, rank: int, step: int, claims: Claims) -> torch.Tensor:
    group = tuple(range(run.world)) if claims.world_only else run.group(rank)
    indices = range(len(run.scenario.params))
    return torch.cat([mean(run, rank, step, index, group).reshape(-1) for index in indices])


def _results(run: Run, rank: int, step: int) -> torch.Tensor | None:
    """Return the results of a step in float64; None if one is missing or not finite."""
    results = [run.got(rank, step, index) for index in range(len(run.scenario.params))]
    parts = [one.double().reshape(-1) for one in results if one is not None]
    if len(parts) < len(results) or not all(part.isfinite().all() for part in parts):
        return None
    return torch.cat(parts)
