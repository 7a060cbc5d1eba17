"""Compare a subject's results with those of a reference that it claims to be like (rule 13.8)."""

from itertools import combinations

import torch

from conformance.judging.oracles.lossy.common import joined
from conformance.judging.oracles.mean import mean as mean_of
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.model import MANY_STEPS


def require_near_reference(
    runs: dict[str, Run], rank: int, step: int, found: Found
) -> torch.Tensor | None:
    """Require the subject's result to be near the reference's, the first of ``runs`` after its own.

    After hundreds of steps they need not be near: if roundings differ, an element that is as large
    as another one may be sent a step later.

    Returns:
        For each run the length of its result, and the result's distance from the mean; None if the
        requirement does not hold.
    """
    subject = next(iter(runs.values()))
    place = f"rank {rank}, step {step}"
    all_results = [_whole_result(run, rank, step) for run in runs.values()]
    results = [got for got in all_results if got is not None]
    complete = len(results) == len(runs)
    if not found.require(complete, "a gradient", f"{place}: a parameter has none"):
        return None
    indices = range(len(subject.scenario.params))
    mean = torch.cat([mean_of(subject, rank, step, index) for index in indices])
    lengths = torch.tensor(
        [(float(result.norm()), float((result - mean).norm())) for result in results]
    )
    if subject.scenario.unrecorded_steps >= MANY_STEPS:
        return lengths
    distances = [float((one - other).norm()) for one, other in combinations(results[1:], 2)]
    bound = 2 * max(distances, default=0.0) + float(mean.norm()) / 256
    off = float((results[0] - results[1]).norm())
    expected = f"a result within {bound:.3g} of the reference's"
    if not found.require(off <= bound, expected, f"{place}: {off:.3g} away"):
        return None
    found.checked(len(mean), off / bound)
    return lengths


def require_lengths(rank: int, kind: str, sums: torch.Tensor, found: Found) -> bool:
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


def _whole_result(run: Run, rank: int, step: int) -> torch.Tensor | None:
    """Return the results of all parameters in one vector, or None if one is missing."""
    return joined([run.got(rank, step, index) for index in range(len(run.scenario.params))])
