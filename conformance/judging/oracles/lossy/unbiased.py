"""Judge random results whose expectation is the mean.

The derivations stand in the package's docstring, under "Unbiased" and "Draws".
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from conformance.judging.oracles.lossy.common import (
    ROUNDINGS,
    JudgedRun,
    likely_cause,
    unit_roundoff,
)
from conformance.scenarios.dust_values import is_dust
from conformance.scenarios.gradients import BESIDE_FROM

SIGMAS = 6.0
PEAKS = 12.0
MANY = 256  # elements that a parameter must have for directions of its own
SOME = 28  # elements that a parameter must have for the same, if enough of its results are sent
SENT = 100  # results other than zero that are enough
FINE = 1 / 4  # the relative error of a draw that is near the mean
SMALL = 1 / 20  # of a typical element: the bias that is not found in small parameters
OFTEN = 2 * 1 / 5 * 4 / 5  # the share of elements that change from draw to draw
LONGEST_LAG = 80  # steps after which noise may repeat, and is still found in 160 draws
SENT_OFTEN = 1 / 3  # of the draws, by elements that are no larger
NOTHING = 2.0**-40  # of a mean; errors are computed in float64
SMALLEST = 2.0**-15  # of the largest element, of the small ones beside it
DUST_SENT = 36  # elements of dust: if as many are to be expected, one has to be sent
ALONE = 0.9  # of a parameter's norm: one element that is so large is an outlier


@dataclass
class Draws:
    """The draws of one rank; every parameter is divided by the scale of its gradients.

    Attributes:
        errors: result minus mean, ``[draws, numel]`` by parameter.
        means: the means, likewise.
        steps: the steps of the draws.
    """

    errors: dict[int, torch.Tensor]
    means: dict[int, torch.Tensor]
    steps: list[int]


def draws_of(judged: JudgedRun, rank: int, steps: range) -> Draws | None:
    """Return the draws of a rank; record the failure and return None if a result is missing.

    Steps of zeros are no draws.
    """
    kinds = judged.run.scenario.steps
    drawn = [step for step in steps if kinds[step] != "zero_all"]
    draws = Draws({}, {}, drawn)
    for _, index, _ in judged.parameters(rank):
        got = judged.results(rank, index, drawn)
        if got is None:
            return None
        scale = 2.0 ** judged.run.scenario.params[index].exponent
        means = torch.stack([judged.mean(rank, step, index) for step in drawn])
        draws.means[index] = means / scale
        draws.errors[index] = (got - means) / scale
    return draws


def require_expectation(judged: JudgedRun, steps: range) -> None:
    """Require the errors of random results to cancel out."""
    for rank in range(judged.run.world):
        if not judged.trains_throughout(rank):
            continue
        draws = draws_of(judged, rank, steps)
        if draws is None or not _require_rows(judged, rank, draws):
            return
        if not _require_unbiased(judged, rank, draws):
            return


def _require_rows(judged: JudgedRun, rank: int, draws: Draws) -> bool:
    """Require the rows of sparse gradients to be right on average, see "Rows"."""
    specs = judged.run.scenario.params
    sparse = [index for index in draws.errors if specs[index].layout == "sparse"]
    if not sparse:
        return True
    parts = [([index], judged.run.parameter_name(index)) for index in sparse]
    parts = [(sparse, "all embeddings"), *parts]
    used = {index: draws.means[index] != 0 for index in sparse}
    sent = {index: _rows_sent(draws, used, index, specs[index].shape[0]) for index in sparse}
    place = f"rank {rank}, rows of"
    some = sum(sent.values())
    if not judged.found.require(
        some > 0 or not _sends_dense_elements(draws, sparse),
        "rows of sparse gradients, if elements of dense ones are sent in a third of the draws",
        f"{place} all embeddings: all are zero in {len(draws.steps)} draws",
    ):
        return False
    for indices, name in parts:
        # Elements that no rank has used may be noise; which ones are used no draw decides.
        columns = [used[index].any(0) for index in indices]
        both = list(zip(indices, columns, strict=True))
        errors = torch.cat([(draws.errors[i] * used[i])[:, kept] for i, kept in both], dim=1)
        means = torch.cat([draws.means[i][:, kept] for i, kept in both], dim=1)
        is_fine = float(errors.norm()) <= FINE * float(means.norm())
        if not is_fine and sum(sent[index] for index in indices) < SENT:
            continue
        typical = float(means.norm()) / math.sqrt(max(1, int((means != 0).sum())))
        unit = max(unit_roundoff(judged.run, index) for index in indices)
        # Rows differ from step to step: a direction for each.
        directions = _directions_of_steps(means)
        slack = ROUNDINGS * unit * typical
        if not _require_cancelling_along(
            judged, errors, means, directions, f"{place} {name}", slack
        ):
            return False
    return True


def _rows_sent(draws: Draws, used: dict[int, torch.Tensor], index: int, rows: int) -> int:
    """Return how often a row that a rank has used was other than zero."""
    got = (draws.errors[index] + draws.means[index] != 0) & used[index]
    return int(got.reshape(len(got), rows, -1).any(2).sum())


def _sends_dense_elements(draws: Draws, sparse: list[int]) -> bool:
    """Whether elements of dense parameters are other than zero in a third of the draws."""
    dense = [index for index in draws.errors if index not in sparse]
    if not dense:
        return False
    got = torch.cat([draws.errors[index] + draws.means[index] for index in dense], dim=1)
    return float((got != 0).double().mean()) >= SENT_OFTEN


def require_small_elements(judged: JudgedRun, steps: range) -> None:
    """Require small elements beside large ones to be right on average, in large parameters."""
    scenario = judged.run.scenario
    drawn = [step for step in steps if scenario.steps[step] == "beside"]
    large = [
        index
        for index, spec in enumerate(scenario.params)
        if math.prod(spec.shape) >= BESIDE_FROM and spec.dtype == "float32"
    ]
    for rank, index in product(range(judged.run.world), large):
        got = judged.results(rank, index, drawn)
        if got is None:
            return
        right = judged.mean(rank, drawn[0], index)
        place = f"rank {rank}, parameter {judged.run.parameter_name(index)}"
        if not _require_small_ones(judged, got - right, right, place, index):
            return


def _require_unbiased(judged: JudgedRun, rank: int, draws: Draws) -> bool:
    """Judge one rank's draws."""
    errors = draws.errors
    # An outlier would hide all other elements of the model, and be a seldom draw of them.
    size = len(judged.group(rank))
    usual = [index for index in errors if not _has_outlier(draws.means[index][0], size)]
    whole = torch.cat([errors[index] for index in usual], dim=1)
    right = torch.cat([draws.means[index] for index in usual], dim=1)
    is_fine = float(whole.norm()) <= FINE * float(right.norm())
    typical = float(right.norm()) / math.sqrt(right.numel())
    varies_often = float((whole[1:] != whole[:-1]).double().mean()) >= OFTEN
    slack = ROUNDINGS * max(unit_roundoff(judged.run, index) for index in errors) * typical
    if not _require_cancelling(judged, whole, right[0], f"rank {rank}, all parameters", slack):
        return False
    for index in errors:
        place = f"rank {rank}, parameter {judged.run.parameter_name(index)}"
        means = draws.means[index]
        if index not in usual:
            if varies_often and not _require_outliers(judged, errors[index], means, place, size):
                return False
            continue
        if varies_often and not _require_constant_is_mean(judged, errors[index], means, place):
            return False
        if not _require_sent(judged, draws, rank, index, place):
            return False
        numel = errors[index].size(1)
        sent = int(((errors[index] + means) != 0).sum())
        has_enough = numel >= MANY or (numel >= SOME and sent >= SENT)
        if not is_fine and not has_enough:
            continue
        slack = ROUNDINGS * unit_roundoff(judged.run, index) * typical
        if numel < MANY:
            slack += SMALL * typical
        if not _require_cancelling(judged, errors[index], means[0], place, slack):
            return False
    return True


def _has_outlier(means: torch.Tensor, count: int) -> bool:
    """Whether ``count`` of many elements are nearly all of a parameter: one of each rank."""
    largest = means.abs().topk(min(count, means.numel())).values
    return means.numel() >= MANY and float(largest.norm()) >= ALONE * float(means.norm()) > 0


def _require_outliers(
    judged: JudgedRun, errors: torch.Tensor, means: torch.Tensor, place: str, count: int
) -> bool:
    """Require the elements that are nearly all of a parameter to be right on average."""
    draws = len(errors)
    for at in means[0].abs().topk(count).indices.tolist():
        right = float(means[0, at])
        average = float(errors[:, at].mean())
        spread = float(errors[:, at].square().sum().sqrt())
        peak = float(errors[:, at].abs().max())
        bound = (SIGMAS * spread + PEAKS * peak) / draws
        if float((errors[:, at] - average).abs().max()) <= FINE * abs(right):
            bound = min(bound, FINE * abs(right))
        bound += SMALL * abs(right)
        holds = judged.found.require(
            abs(average) <= bound,
            f"an element of {right:.4g} beside small ones, on average, within {bound:.3g}",
            f"{place}, element {at}: {right + average:.4g} on average of {draws} draws",
            "a range that is cut, or values that are clamped" if abs(average) > bound else "",
        )
        if not holds:
            return False
    judged.found.checked(count)
    return True


def _require_small_ones(
    judged: JudgedRun, errors: torch.Tensor, right: torch.Tensor, place: str, index: int
) -> bool:
    """Require the small elements beside large ones to be right on average (see "Beside large
    ones").
    """
    largest = float(right.abs().max())
    rounding = ROUNDINGS * unit_roundoff(judged.run, index) * largest
    for low, high, members in _octaves(right.abs() / largest):
        named = f"elements of {low:.3g} to {high:.3g} of the largest"
        slack = rounding * int(members.sum())
        if not _require_right_on_average(judged, errors, right, members, place, named, slack):
            return False
    return True


def require_dust(judged: JudgedRun, steps: range) -> None:
    """Require elements that are thousands of times smaller than others to be right on average."""
    drawn = list(steps)
    for rank, (index, spec) in product(
        range(judged.run.world), enumerate(judged.run.scenario.params)
    ):
        got = judged.results(rank, index, drawn)
        if got is None:
            return
        right = judged.mean(rank, drawn[0], index)
        members = is_dust(right.numel())
        place = f"rank {rank}, parameter {judged.run.parameter_name(index)} ({spec.dtype})"
        named = f"elements of {float(right[members].abs().mean()):.3g} beside larger ones"
        subsets = {
            "": members,
            "positive ": members & (right > 0),
            "even ": members & (torch.arange(right.numel()) % 2 == 0),
            "first ": members & (torch.arange(right.numel()) < right.numel() // 2),
        }
        # What is rounded in units of the largest element is rounded up as often as down.
        rounding = ROUNDINGS * unit_roundoff(judged.run, index) * float(right.abs().max())
        errors = got - right
        is_sent = got != 0
        often = float(is_sent[:, ~members].double().mean()) / float(right[~members].abs().mean())
        for which, subset in subsets.items():
            expected = often * float(right[subset].abs().sum()) * len(got)
            if expected < DUST_SENT and not is_sent[:, subset].any():
                continue
            slack = rounding * math.sqrt(int(subset.sum()))
            of = f"{which}{named}"
            if not _require_right_on_average(judged, errors, right, subset, place, of, slack):
                return


def _require_right_on_average(
    judged: JudgedRun,
    errors: torch.Tensor,
    right: torch.Tensor,
    members: torch.Tensor,
    place: str,
    named: str,
    slack: float,
) -> bool:
    """Require some elements of a parameter to be right on average.

    Args:
        errors: results minus means, ``[draws, numel]``.
        right: the means.
        members: the mask of the elements.
        place: the rank and the parameter, in words.
        named: the elements, in words.
        slack: the roundings of a draw.
    """
    draws = len(errors)
    along = errors[:, members] @ right[members].sign()
    total = abs(float(along.sum()))
    spread = math.sqrt(float(along.square().sum()))
    numel = int(members.sum())
    bound = SIGMAS * spread + PEAKS * float(along.abs().max()) + draws * slack
    share = 1 + float(along.sum()) / draws / float(right[members].abs().sum())
    holds = judged.found.require(
        total <= bound,
        f"{named}, right on average: errors that add up to at most {bound:.3g} over {draws} draws",
        f"{place}: the errors add up to {total:.3g}; the average result is {share:.3g} times the "
        f"mean of these {numel} elements",
        "too few random bits, a threshold or a clamp, or a wrong probability or scale for these "
        "elements",
    )
    if holds:
        judged.found.checked(draws, total / bound if bound else None)
    return holds


def _octaves(sizes: torch.Tensor) -> Iterator[tuple[float, float, torch.Tensor]]:
    """Yield octaves of relative sizes below 1/8, from the largest on, and masks of their elements.

    Octaves are joined until there are ``MANY`` elements; fewer at the end are left out.
    """
    high = 1 / 8
    low = high
    while bool((sizes < high).any()) and low > SMALLEST:
        low /= 2
        members = (sizes < high) & (sizes >= low)
        if int(members.sum()) >= MANY:
            yield low, high, members
            high = low


def _require_constant_is_mean(
    judged: JudgedRun, errors: torch.Tensor, means: torch.Tensor, place: str
) -> bool:
    """Require a parameter with the same values in all draws, not all zero, to be the mean."""
    got = errors + means
    same_inputs = bool((means == means[0]).all())
    same_results = bool((got == got[0]).all())
    if not same_inputs or not same_results or not got[0].any():
        return True
    off = float(errors[0].norm()) / float(means[0].norm())
    return judged.found.require(
        off <= FINE,
        "the mean, if results do not vary",
        f"{place}: the same {off:.3g} off in each of {len(got)} draws",
    )


def _require_sent(judged: JudgedRun, draws: Draws, rank: int, index: int, place: str) -> bool:
    """Require each element to be sent at all, if smaller ones often are (see "Never sent")."""
    means = draws.means[index]
    if not bool((means == means[0]).all()):
        return True
    group = judged.group(rank)
    fed = torch.stack([judged.run.fed(other, draws.steps[0], index) for other in group])
    # DDP regroups its buckets after the first step, and other elements are the last of a bucket.
    sent = ((draws.errors[index] + means).abs() > NOTHING * means.abs())[1:]
    sizes = fed.abs().mean(0)
    order = sizes.argsort()
    rates = sent.double().mean(0)[order]
    of_smaller = torch.empty_like(rates)
    of_smaller[order] = rates.cumsum(0) / torch.arange(1, len(rates) + 1)
    agree = (fed > 0).all(0) | (fed < 0).all(0)
    lost = ~sent.any(0) & agree & (of_smaller >= SENT_OFTEN)
    at = int(lost.double().argmax()) if lost.any() else 0
    return judged.found.require(
        not lost.any(),
        f"every element other than zero in at least one of {len(sent)} results, as elements that "
        "are no larger are in a third of them",
        f"{place}: {int(lost.sum())} elements are zero in all of them, the first is element {at}",
        "elements that are never sent, as those before the first block or after the last one"
        * bool(lost.any()),
    )


def _require_cancelling(
    judged: JudgedRun, errors: torch.Tensor, right: torch.Tensor, place: str, slack: float
) -> bool:
    """Require errors ``[draws, n]`` to cancel out, up to ``slack`` for each element."""
    directions = (u.unsqueeze(0) for u in _directions(right))
    return _require_cancelling_along(judged, errors, right, directions, place, slack)


def _require_cancelling_along(
    judged: JudgedRun,
    errors: torch.Tensor,
    right: torch.Tensor,
    directions: Iterable[torch.Tensor],
    place: str,
    slack: float,
) -> bool:
    """Require errors ``[draws, n]`` to cancel out along directions.

    Args:
        right: the mean, or that of each draw.
        directions: each has one row for all draws, or one row for each draw.
        slack: what each element may be off in each draw.
    """
    draws = len(errors)
    for u in directions:
        along = errors @ u[0] if len(u) == 1 else (errors * u).sum(1)
        total = abs(float(along.sum()))
        peak = float(along.abs().max())
        spread = math.sqrt(float(along.square().sum()))
        bound = SIGMAS * spread + PEAKS * peak + draws * slack * math.sqrt(errors.size(1))
        means = right.expand_as(errors)
        off = total / draws / max(float(means.norm()) / math.sqrt(draws), 1e-300)
        cause = ""
        if total > bound:
            sums = (errors + means).sum(0)
            cause = likely_cause(sums, means.sum(0), torch.zeros_like(sums), 1)
        holds = judged.found.require(
            total <= bound,
            f"errors that cancel out: a sum of at most {bound:.3g} over {draws} draws, along one "
            "direction",
            f"{place}: a sum of {total:.3g}; the average result is off by {off:.3g} of the norm of "
            "the mean",
            cause,
        )
        if not holds:
            return False
        judged.found.checked(draws, total / bound if bound else None)
    return True


def _directions(right: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield six directions of length 1: the mean, its signs, all ones, and three from a hash."""
    rows = [right, right.sign(), torch.ones_like(right)]
    numbers = torch.arange(1, right.numel() + 1)
    rows += [((numbers * odd) % 127 < 63).double() * 2 - 1 for odd in (37, 59, 83)]
    for row in rows:
        yield row / max(float(row.norm()), 1e-300)


def _directions_of_steps(means: torch.Tensor) -> list[torch.Tensor]:
    """Return three directions of length 1 for each draw: its mean, the signs of that, and ones."""
    rows = [means, means.sign(), (means != 0).double()]
    return [row / row.norm(dim=1, keepdim=True).clamp(min=1e-300) for row in rows]


def require_fresh_draws(judged: JudgedRun, steps: range) -> None:
    """Require the errors of one draw to have nothing in common with those of a later draw."""
    for rank in range(judged.run.world):
        draws = draws_of(judged, rank, steps)
        if draws is None:
            return
        together = torch.cat(list(draws.errors.values()), dim=1)
        parts = [(f"rank {rank}, all parameters", together)]
        for index, errors in draws.errors.items():
            if errors.size(1) >= MANY:
                name = judged.run.parameter_name(index)
                parts.append((f"rank {rank}, parameter {name}", errors))
        if not all(_require_fresh(judged, place, errors) for place, errors in parts):
            return


def _require_fresh(judged: JudgedRun, place: str, errors: torch.Tensor) -> bool:
    products = errors @ errors.t()
    for lag in range(1, min(LONGEST_LAG, len(errors) // 2) + 1):
        pairs = products.diagonal(lag)
        total = float(pairs.sum())
        spread = math.sqrt(float(pairs.square().sum()))
        bound = SIGMAS * spread + PEAKS * float(pairs.abs().max())
        share = total / max(float(products.diagonal().sum()), 1e-300)
        holds = judged.found.require(
            total <= bound,
            f"errors that are not correlated with those of {lag} steps later",
            f"{place}: a correlation of {share:.3g}",
            f"the random numbers repeat after {lag} steps, as from a seed that comes again"
            if share > FINE
            else "",
        )
        if not holds:
            return False
        judged.found.checked(len(pairs), max(0.0, total) / bound if bound else None)
    return True
