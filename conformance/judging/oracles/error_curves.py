"""Compute the errors of a run step by step, for the pictures of a report. They decide nothing.

The errors and bounds are those of the rules: of ``oracles/mean.py`` for exact, rounded and summed
results, and of ``oracles/long_runs.py`` for the claims that bound a sum or a distance. A curve has
at most ``POINTS`` points. Each stands for a window of consecutive steps, and shows the step of the
window whose error is the largest share of its bound.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from conformance.judging.oracles.clusters import share_of_bound
from conformance.judging.oracles.long_runs import LongRecord, estimate_bounds, residual_bounds
from conformance.judging.oracles.mean import expected, expected_of_inputs, is_right, precision
from conformance.records.run import Run
from conformance.scenarios.gradients import at_scale
from conformance.scenarios.hook import SCALE_NUMEL, SCALES
from conformance.subjects.claims import CONTRACTION, DIFFERENCE, FEEDBACK, Claims

POINTS = 120
# The lowest and the highest edge of the bins of a distribution, as powers of 2.
_LOWEST = -10
_HIGHEST = 1


@dataclass(frozen=True)
class Point:
    """The largest error of one step.

    Attributes:
        at: the step, or the number of ranks.
        error: the error.
        bound: the bound of that error; 0 if the result must be exact, None if there is none.
    """

    at: int
    error: float
    bound: float | None


@dataclass(frozen=True)
class ErrorCurve:
    """The errors of one run.

    Attributes:
        run: the name of the run.
        what: the error and its unit in words.
        points: the errors in order.
        steps: the number of steps that the curve covers.
        bins: the number of elements in each bin of the distribution: no error, then shares of the
            bound by powers of 2; () if elements have no bounds of their own.
    """

    run: str
    what: str
    points: tuple[Point, ...]
    steps: int
    bins: tuple[int, ...] = ()


def bin_labels() -> list[str]:
    """Return the labels of the bins of a distribution."""
    edges = [f"1/{2**-power}" if power < 0 else str(2**power) for power in _edges()]
    return ["0", f"< {edges[0]}", *(f"≤ {edge}" for edge in edges[1:]), f"> {edges[-1]}"]


def error_curve(run: Run, claims: Claims) -> ErrorCurve | None:
    """Return the errors of a run, or None if its results are incomplete or have no such bound."""
    if run.scenario.long_run:
        return _long_curve(LongRecord(run, claims))
    if claims.lossy or not run.scenario.steps or not run.scenario.params:
        return None
    return _mean_curve(run, claims)


def errors_at_scale(run: Run, claims: Claims) -> ErrorCurve | None:
    """Return the largest error among simulated ranks by their number; None if none were simulated.

    Errors and bounds are shares of the mean magnitude of the element's gradients. A bound that
    decides nothing is left out.
    """
    if not run.ranks or claims.lossy or claims.fused:
        return None
    begin = SCALES.index("random") * SCALE_NUMEL
    place = slice(begin, begin + SCALE_NUMEL)
    points = []
    for event in run.ranks[0].all("simulated"):
        size = event["size"]
        got = run.ranks[0].tensors.get(f"at scale/{size}")
        if got is None:
            continue
        values = at_scale(size)[:, place].float().double()
        factor = size if claims.sum else 1
        off = (got.double()[..., place] - values.mean(0) * factor).abs()
        error = float((off / (values.abs().mean(0) * factor)).max())
        points.append(Point(size, error, share_of_bound(size, claims)))
    if not points:
        return None
    what = "error as a share of the mean magnitude"
    ordered = sorted(points, key=lambda point: point.at)
    return ErrorCurve(run.name, what, tuple(ordered), len(ordered))


# --- one run --------------------------------------------------------------------------------------


def _mean_curve(run: Run, claims: Claims) -> ErrorCurve | None:
    """Compare every step with the mean, on all ranks."""
    points = []
    bins = [0] * len(bin_labels())
    for step in range(len(run.scenario.steps)):
        errors: list[torch.Tensor] = []
        bounds: list[torch.Tensor] = []
        scale = 0.0
        for rank in range(run.world):
            for index, spec in enumerate(run.scenario.params):
                got = run.got(rank, step, index)
                if got is None or not got.numel() or not run.receives(rank, step, index):
                    continue
                right, bound, values = expected(run, rank, step, index, claims)
                if right.shape != got.shape or spec.frozen:
                    continue
                largest = precision(spec.dtype, claims)[2]
                errors.append(_errors(got, right, bound, values, largest))
                bounds.append(bound)
                finite = right[right.isfinite()]
                scale = max(scale, float(finite.abs().max()) if finite.numel() else 0.0)
        if errors and scale:
            error = torch.cat(errors)
            bound = torch.cat(bounds)
            _count(bins, error, bound)
            points.append(_worst(step, error, bound, scale))
    return _curve(run, points, len(run.scenario.steps), bins)


def _long_curve(record: LongRecord) -> ErrorCurve | None:
    claims = record.claims
    if any(record.results(0, index) is None for index in record.indices):
        return None
    if not claims.lossy:
        return _exact_long_curve(record)
    steps = [*record.feed.first_steps[:-1]]
    distances = _distances(record)
    after = record.warm_up
    what = "distance of the result from the mean"
    if claims.lossy == FEEDBACK:
        distances = _sums_of_errors(record)
        limits = residual_bounds(record)
        what = "distance of the sum of all results so far from the sum of all means"
    elif claims.lossy == DIFFERENCE:
        limits = estimate_bounds(record)
    elif claims.lossy == CONTRACTION:
        limits = math.sqrt(1 - claims.delta) * record.norms[record.places] * record.counts
    else:
        limits = torch.full_like(distances, math.inf)
    # Gradients of this size are typical of the run: the median of the fed norms.
    scale = float(record.norms[record.places].median()) or 1.0
    points = [
        Point(
            steps[number],
            float(distances[number]) / scale,
            float(limits[number]) / scale if limits[number].isfinite() else None,
        )
        for number in range(after, record.feed.rounds)
    ]
    return ErrorCurve(
        record.run.name,
        f"{what}, in norms of a typical gradient",
        _thinned(points),
        record.feed.steps,
    )


def _exact_long_curve(record: LongRecord) -> ErrorCurve | None:
    """Compare every round of the first rank with the mean: rule 23.2 compares the ranks."""
    run = record.run
    group = tuple(range(run.world))
    rounds = record.feed.rounds
    worst = torch.full((rounds,), -1.0, dtype=torch.float64)
    points: list[Point | None] = [None] * rounds
    bins = [0] * len(bin_labels())
    for index in record.indices:
        rows = record.results(0, index)
        assert rows is not None
        largest = precision(run.scenario.params[index].dtype, record.claims)[2]
        for place, (kind, number) in enumerate(record.feed.keys):
            at = (record.places == place).nonzero().reshape(-1)
            inputs = expected_of_inputs(
                kind,
                run.scenario.params[index],
                group,
                (True,) * run.world,
                run.world,
                number,
                index,
                record.claims,
            )
            right, bound, values = inputs.right, inputs.bound, inputs.values
            finite = right[right.isfinite()]
            scale = float(finite.abs().max()) if finite.numel() else 0.0
            if not len(at) or not scale:
                continue
            got = rows[at] / record.counts[at].unsqueeze(1)
            errors = _errors(got, right, bound, values, largest)
            bounds = bound.expand_as(errors)
            _count(bins, errors, bounds)
            shares = _shares(errors, bounds)
            elements = shares.argmax(1)
            for row, element in enumerate(elements.tolist()):
                round_number = int(at[row])
                if float(shares[row, element]) > worst[round_number]:
                    worst[round_number] = shares[row, element]
                    limit = float(bound[element]) / scale
                    points[round_number] = Point(
                        record.feed.first_steps[round_number],
                        float(errors[row, element]) / scale,
                        limit,
                    )
    return _curve(run, [point for point in points if point], record.feed.steps, bins)


def _curve(run: Run, points: list[Point], steps: int, bins: Sequence[int]) -> ErrorCurve | None:
    if not points:
        return None
    what = "largest error of a step, as a share of its largest gradient"
    return ErrorCurve(run.name, what, _thinned(points), steps, tuple(bins))


def _worst(step: int, errors: torch.Tensor, bounds: torch.Tensor, scale: float) -> Point:
    """Return the element whose error is the largest share of its bound."""
    element = int(_shares(errors, bounds).argmax())
    bound = float(bounds[element]) / scale
    return Point(step, float(errors[element]) / scale, bound)


def _errors(
    got: torch.Tensor,
    right: torch.Tensor,
    bound: torch.Tensor,
    values: torch.Tensor,
    largest: float,
) -> torch.Tensor:
    """Return the errors of results.

    A right result that is not finite has no distance to another one: it counts as no error here,
    and rules judge it. An overflow that the claims allow counts as no error either.

    Args:
        got: the results.
        right: the right results.
        bound: the bound of each error.
        values: the contributions of the ranks, ``[ranks, numel]``.
        largest: the largest number of the dtype that the claims round to.
    """
    overflow = ~got.isfinite() & is_right(got, right, bound, values, largest)
    counted = right.isfinite() & ~overflow
    errors = torch.where(counted, (got - right).abs(), torch.zeros_like(right))
    return errors.nan_to_num(math.inf, math.inf)


def _shares(errors: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return errors as shares of their bounds; an error without a bound is infinite."""
    shares = torch.where(errors > 0, errors / bounds, torch.zeros_like(errors))
    # Between elements without an error the one with the largest bound is shown.
    return (shares + bounds * 1e-30).nan_to_num(math.inf, math.inf)


def _count(bins: list[int], errors: torch.Tensor, bounds: torch.Tensor) -> None:
    """Enter elements into the bins of a distribution."""
    is_zero = errors == 0
    bins[0] += int(is_zero.sum())
    shares = _shares(errors, bounds)[~is_zero]
    edges = torch.tensor([2.0**power for power in _edges()], dtype=torch.float64)
    places = torch.bucketize(shares, edges)
    for place, number in enumerate(torch.bincount(places, minlength=len(edges) + 1).tolist()):
        bins[1 + place] += number


def _edges() -> range:
    return range(_LOWEST, _HIGHEST)


def _errors_by_round(record: LongRecord) -> Iterator[torch.Tensor]:
    """Yield the errors of the first rank by parameter, ``[rounds, numel]``."""
    for index in record.indices:
        rows = record.results(0, index)
        assert rows is not None
        yield rows - record.means[index][record.places] * record.counts.unsqueeze(1)


def _distances(record: LongRecord) -> torch.Tensor:
    """Return the distance of each round's result from the mean, over the whole model."""
    squares = [errors.square().sum(1) for errors in _errors_by_round(record)]
    return torch.stack(squares).sum(0).sqrt()


def _sums_of_errors(record: LongRecord) -> torch.Tensor:
    """Return the distance of the sums after each round; of the parameter with the largest."""
    after = record.warm_up
    largest = torch.zeros(record.feed.rounds, dtype=torch.float64)
    for errors in _errors_by_round(record):
        sums = errors[after:].cumsum(0).norm(dim=1)
        largest[after:] = torch.maximum(largest[after:], sums)
    return largest


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return at most ``POINTS`` points: of each window of steps the worst one."""
    width = math.ceil(len(points) / POINTS)
    return tuple(
        max(points[begin : begin + width], key=_badness) for begin in range(0, len(points), width)
    )


def _badness(point: Point) -> float:
    """Return a number by which points are compared: the share of the bound."""
    if not math.isfinite(point.error):
        return math.inf
    if point.bound is None:
        return point.error
    if not point.bound:
        return math.inf if point.error else -1.0
    return point.error / point.bound
