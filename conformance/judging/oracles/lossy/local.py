"""Judge local results: weighted means of some ranks' gradients.

The derivations stand in the package's docstring, under "Local" and "Mixing".
"""

import math
from itertools import product
from typing import Any

import torch

from conformance.judging.oracles.lossy.common import ROUNDINGS, JudgedRun, unit_roundoff
from conformance.judging.oracles.weights import WEIGHT_SLACK, named_weights
from conformance.scenarios.specials import base_kind

# Kinds of gradients from which the weights of a local result cannot be solved.
_WITHOUT_WEIGHTS = ("zero_all", "nan", "inf", "minus_zero")


def require_weights(judged: JudgedRun, steps: range) -> None:
    """Require weighted means whose weights sum to 1 on each rank, and for each rank."""
    run = judged.run
    for step in steps:
        kind = base_kind(run.scenario.steps[step])
        if kind in _WITHOUT_WEIGHTS or kind.startswith("tiny"):
            continue
        ranks = range(run.world)
        training = [rank for rank in ranks if run.scenario.has_input(rank, run.world, step)]
        tables: dict[int, list[torch.Tensor]] = {}
        for rank in training:
            for call in run.ranks[rank].all("call", step=step):
                weights = weights_of(judged, rank, step, call)
                if weights is None:
                    return
                tables.setdefault(call["index"], []).append(weights)
        for bucket, rows in tables.items():
            place = f"step {step}, bucket {bucket}"
            all_seen = len(training) == run.world
            counts = torch.stack(rows).sum(0)
            if not _require_equal_influence(judged, counts, place, all_seen):
                return


def _require_equal_influence(
    judged: JudgedRun, counts: torch.Tensor, place: str, all_seen: bool
) -> bool:
    """Require each rank's weights to sum to 1 over all ranks."""
    known = all_seen and not counts.isnan().any()
    even = not known or bool(((counts - 1).abs() <= WEIGHT_SLACK).all())
    times = ", ".join(f"{float(count):.3g}" for count in counts)
    return judged.found.require(
        even,
        "weights of each rank's gradient that add up to 1 over all ranks' results",
        f"{place}: the weights of ranks 0, 1, ... add up to {times}",
    )


def weights_of(
    judged: JudgedRun, rank: int, step: int, call: dict[str, Any]
) -> torch.Tensor | None:
    """Return the weights ``[W]`` of ranks in a bucket of ``rank``.

    They are NaN if the bucket is too small to solve for them, or too coarsely rounded. If the
    result is no weighted mean, record the failure and return None.
    """
    run = judged.run
    weights = torch.full((run.world,), math.nan, dtype=torch.float64)
    numels = [math.prod(spec.shape) for spec in run.scenario.params]
    indices = [index for index in judged.receiving(rank, step, call) if numels[index]]
    if not indices:
        return weights
    group = judged.group(rank)
    place = f"rank {rank}, step {step}, bucket {call['index']}"
    got = judged.bucket_result(rank, step, indices, place)
    if got is None:
        return None
    fed = torch.stack([torch.cat([run.fed(r, step, i) for i in indices]) for r in group], dim=1)
    slack = ROUNDINGS * max(unit_roundoff(run, i) for i in indices) * fed.abs().sum(1)
    outside = (got > fed.amax(1) + slack) | (got < fed.amin(1) - slack)
    if not judged.found.require(
        not outside.any(),
        "between the smallest and the largest gradient of the ranks",
        f"{place}: {int(outside.sum())} of {len(got)} elements lie outside",
    ):
        return None
    # Too few elements do not determine the weights, and neither do the zeros of a rank that feeds
    # no parameter of the bucket, or an embedding without any row.
    feeding = int((fed != 0).any(1).sum())
    hidden = not (fed != 0).any(0).all()
    if feeding < 4 * len(group) or hidden:
        return weights
    solved = solve(fed, got)
    if not _require_explained(judged, fed, got, solved, slack, group, place):
        return None
    judged.found.checked(len(got))
    if uncertainty(fed, slack) > WEIGHT_SLACK:
        return weights
    if not _require_mean(judged, solved, group, rank, place):
        return None
    weights.zero_()
    weights[list(group)] = solved
    return weights


def _require_explained(
    judged: JudgedRun,
    fed: torch.Tensor,
    got: torch.Tensor,
    solved: torch.Tensor,
    slack: torch.Tensor,
    group: tuple[int, ...],
    place: str,
) -> bool:
    """Require the solved weights to explain every element."""
    wrong = (got - fed @ solved).abs() > slack
    nearest = named_weights(solved, group)
    return judged.found.require(
        not wrong.any(),
        "the same weights of the ranks' gradients for all elements of a bucket",
        f"{place}: {int(wrong.sum())} of {len(got)} elements do not fit the weights that fit best, "
        f"{nearest}",
    )


def _require_mean(
    judged: JudgedRun, solved: torch.Tensor, group: tuple[int, ...], rank: int, place: str
) -> bool:
    """Require the solved weights to be those of a mean."""
    is_nonnegative = bool((solved >= -WEIGHT_SLACK).all())
    is_mean = bool(abs(solved.sum() - 1) <= WEIGHT_SLACK)
    has_own = bool(solved[group.index(rank)] > WEIGHT_SLACK)
    return judged.found.require(
        is_nonnegative and is_mean and has_own,
        "weights of at least 0 that sum to 1, this rank's own among them",
        f"{place}: {named_weights(solved, group)}",
    )


def uncertainty(fed: torch.Tensor, slack: torch.Tensor) -> float:
    """Return by how much rounding may move a solved weight.

    The weights are linear in the results, whose errors are independent, so that their squares add
    up. Half of ``slack``, eight units, is several times the standard deviation of an error.
    """
    scale = 1 / fed.abs().amax(1).clamp(min=1e-30)
    moved = torch.linalg.pinv(fed * scale.unsqueeze(1)) * (slack * scale)
    return float(moved.norm(dim=1).max()) / 2


def solve(fed: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return the weights ``w`` of least squares, ``fed @ w = got`` with every row scaled to its
    largest element.

    The rest is solved once more: the first solution may be off by hundreds of units in the last
    place, while a float64 result is not (Higham, Accuracy and Stability of Numerical Algorithms,
    section 20.5: iterative refinement).
    """
    scale = 1 / fed.abs().amax(1).clamp(min=1e-30).unsqueeze(1)
    weights = torch.zeros(fed.size(1), dtype=torch.float64)
    for _ in range(2):
        rest = (got - fed @ weights).unsqueeze(1)
        weights += torch.linalg.lstsq(fed * scale, rest * scale).solution.squeeze(1)
    return weights


def heard(judged: JudgedRun, steps: range) -> dict[str, dict[int, torch.Tensor]]:
    """Return who heard whom: for each parameter and step a table ``[W, W]`` of weights.

    A step is left out if a rank's weights are unknown in it. If they are unknown in all steps of
    all parameters, note that there is no evidence.
    """
    run = judged.run
    tables: dict[str, dict[int, torch.Tensor]] = {}
    for step, rank in product(steps, range(run.world)):
        for call in run.ranks[rank].all("call", step=step):
            weights = weights_of(judged, rank, step, call)
            if weights is None:
                return {}
            for index in judged.receiving(rank, step, call):
                steps_of_parameter = tables.setdefault(run.parameter_name(index), {})
                shape = (run.world, run.world)
                table = steps_of_parameter.setdefault(
                    step, torch.full(shape, math.nan, dtype=torch.float64)
                )
                table[rank] = weights
    known = {
        name: {step: table for step, table in by_step.items() if not table.isnan().any()}
        for name, by_step in tables.items()
    }
    if not any(known.values()):
        judged.found.lacks_evidence(
            "the weights of ranks are unknown in all buckets: they are too small, or too coarsely "
            "rounded"
        )
    return known


def connected(weights: torch.Tensor, ranks: tuple[int, ...]) -> list[list[int]]:
    """Return the sets of ranks between which gradients travelled, by weights ``[W, W]``."""
    links = (weights > WEIGHT_SLACK) | (weights.t() > WEIGHT_SLACK)
    left = list(ranks)
    parts = []
    while left:
        part = [left.pop(0)]
        for member in part:
            reached = [rank for rank in left if links[member, rank]]
            part += reached
            left = [rank for rank in left if rank not in reached]
        parts.append(sorted(part))
    return parts


def require_mixing(judged: JudgedRun, steps: range) -> None:
    """Require every rank's gradients to reach every other rank, within the steps of the run."""
    groups = {judged.group(rank) for rank in range(judged.run.world)}
    tables = heard(judged, steps)
    if judged.found.failures:
        return
    mixing = [
        (name, len(by_step), connected(torch.stack(list(by_step.values())).sum(0), group))
        for (name, by_step), group in product(tables.items(), sorted(groups))
        if by_step
    ]
    is_silent = all(len(part) == 1 for _, _, parts in mixing for part in parts)
    for name, number, parts in mixing:
        names = ", ".join(f"{{{', '.join(map(str, part))}}}" for part in parts)
        cause = ""
        if len(parts) > 1:
            cause = cause_of_parts(parts, is_silent)
        holds = judged.found.require(
            len(parts) == 1,
            f"ranks that all exchange gradients within {number} steps, directly or through others",
            f"parameter {name}: no gradient passes between the sets of ranks {names}",
            cause,
        )
        if not holds:
            return
        judged.found.checked(number)


def cause_of_parts(parts: list[list[int]], is_silent: bool) -> str:
    """Return why ranks may be apart in one parameter.

    Args:
        parts: the sets of ranks between which gradients of the parameter travelled.
        is_silent: no gradient of any parameter travelled.
    """
    if is_silent:
        return "nothing is communicated: claim local(ratio=0) if that is meant"
    if all(len(part) == 1 for part in parts):
        return "gradients of other parameters are communicated, and none of this one"
    return (
        "groups that never meet: claim local(mixing=False) if the trainer averages the parameters"
    )


def require_period(judged: JudgedRun, steps: range, period: int) -> None:
    """Require the mean over all ranks at least once in every ``period`` steps, on all ranks."""
    tables = heard(judged, steps)
    if judged.found.failures:
        return
    for name, by_step in tables.items():
        apart = 0
        for step, table in sorted(by_step.items()):
            rows = [judged.group(rank) for rank in range(judged.run.world)]
            is_mean = all(
                bool(((table[rank, list(group)] - 1 / len(group)).abs() <= WEIGHT_SLACK).all())
                for rank, group in enumerate(rows)
            )
            apart = 0 if is_mean else apart + 1
            holds = judged.found.require(
                apart < period,
                f"the mean over all ranks in one of {period} steps",
                f"parameter {name}: not in the {apart} steps up to step {step}",
                "a period that is counted in buckets, or never begins" if apart >= period else "",
            )
            if not holds:
                return
            judged.found.checked(1)
