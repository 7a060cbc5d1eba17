"""Judge folded results, which repeat a table (``scenarios/tables.py``).

All parameters of the model repeat the same table of each rank, up to signs that all ranks share.
The right result, its bound and the claims' other predictions are therefore computed once for the
table. Let y range over the results at one place of the table, with their signs undone. They are
all within the bound of the right value, an interval, exactly if the smallest and the largest of
them are; and the record has these two. Signs change no rounding, so that the bounds are those of
``mean.py``.

Parameters of a fused hook begin at 0, and optimizers step each element by an odd function of its
gradients: parameters repeat a table with the same signs.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from conformance.judging.oracles.mean import EXACT_KINDS, judge_values
from conformance.judging.oracles.optimizer_claim import (
    OWN,
    ROUNDINGS_OF_OPTIMIZER,
    Stepped,
    has_vectors_apart,
)
from conformance.judging.oracles.weights import WEIGHT_SLACK, named_weights
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.gradients import table
from conformance.scenarios.model import Param
from conformance.scenarios.tables import ROWS, row_at, rows
from conformance.subjects.claims import Claims

DTYPE = "float32"  # of all parameters in folded scenarios


@dataclass(frozen=True)
class Place:
    """An element of a parameter.

    Attributes:
        parameter: the number of the parameter.
        element: its position in C order.
        sign: the sign of its row.
    """

    parameter: int
    element: int
    sign: float


def fed_tables(run: Run, step: int) -> torch.Tensor:
    """Return the tables that the ranks feed at a step, ``[W, period]`` in float64."""
    scenario = run.scenario
    return torch.stack(
        [
            table(
                scenario.steps[step],
                getattr(torch, DTYPE),
                world=run.world,
                rank=rank,
                step=step + scenario.first_step,
                period=scenario.period,
            )
            for rank in range(run.world)
        ]
    ).double()


@functools.lru_cache(maxsize=256)
def covered(params: tuple[Param, ...], period: int, indices: tuple[int, ...]) -> torch.Tensor:
    """Return which places of the table some of the parameters have, ``[period]``."""
    places = torch.zeros(period, dtype=torch.bool)
    for index in indices:
        for row in rows(math.prod(params[index].shape), period, index):
            places[row.column : row.column + row.end - row.begin] = True
        if places.all():
            break
    return places


def require_right(run: Run, claims: Claims, found: Found, steps: list[int]) -> bool:
    """Require every element to be right in some steps; report the first that is not.

    Returns:
        Whether the requirement holds.
    """
    numel = sum(math.prod(spec.shape) for spec in run.scenario.params)
    for step in steps:
        values = fed_tables(run, step)
        for rank in range(run.world):
            if not require_all_present(run, rank, step, found):
                return False
            margin = _require_right(run, rank, step, values, claims, found)
            if margin is None:
                return False
            found.checked(numel, margin)
    return True


def require_all_present(run: Run, rank: int, step: int, found: Found) -> bool:
    """Require a gradient of every parameter."""
    event = run.ranks[rank].first("folded", step=step)
    missing = event["missing"] if event else ["all"]
    names = ", ".join(missing[:3])
    actual = f"rank {rank}, step {step}: {len(missing)} parameters have none: {names}"
    return found.require(not missing, "a gradient of every parameter", actual)


def _require_right(
    run: Run, rank: int, step: int, values: torch.Tensor, claims: Claims, found: Found
) -> float | None:
    """Judge one rank's results of a step; return their margin, or None if some are wrong."""
    scenario = run.scenario
    exact = scenario.steps[step] in EXACT_KINDS
    used = covered(scenario.params, scenario.period, tuple(range(len(scenario.params))))
    fold = run.fold(rank, step, "grad")
    margin = 0.0
    for part in ("low", "high"):
        right, bound, bad = judge_values(fold[part], values, DTYPE, claims, exact=exact)
        bad &= used
        if bad.any():
            actual, cause = _describe(run, rank, step, part, bad, values, claims)
            at = int(bad.nonzero()[0])
            within = f" within {bound[at].item():.3g}" if bound[at] else ", bit for bit"
            name = "sum" if claims.sum else "mean"
            expected = (
                f"{name} {right[at].item():.9g}{within} (both values are shown without the sign "
                "that this element has in the model)"
            )
            found.require(False, expected, actual, cause)
            return None
        bounded = fold[part].isfinite() & (bound > 0) & used
        if bounded.any():
            errors = (fold[part] - right).abs()[bounded] / bound[bounded]
            margin = max(margin, float(errors.max()))
    return margin


def _describe(
    run: Run,
    rank: int,
    step: int,
    part: str,
    bad: torch.Tensor,
    values: torch.Tensor,
    claims: Claims,
) -> tuple[str, str]:
    """Return the first wrong value with its place, and the likely cause."""
    fold = run.fold(rank, step, "grad")
    columns = bad.nonzero().flatten()
    first = int(columns[0])
    place = place_of(run, fold, part, first)
    value = f"{fold[part][first].item():.9g}"
    where = f"rank {rank}, step {step}, {words_of(run, rank, step, place)}"
    count = f"wrong for {len(columns)} of the {len(bad)} gradient values that the model repeats"
    cause = _cause(fold[part][columns], values[:, columns], rank, claims)
    seen = _buckets_of(run, rank, step, fold, part, columns)
    return f"{value} on {where}; {count}", "; ".join(filter(None, (cause, seen)))


def place_of(run: Run, fold: dict[str, torch.Tensor], part: str, column: int) -> Place:
    """Return an element that has the smallest or the largest value at a place of the table.

    Args:
        run: the run.
        fold: a folded result of all parameters.
        part: ``low`` or ``high``.
        column: the place.
    """
    period = run.scenario.period
    numels = [math.prod(spec.shape) for spec in run.scenario.params]
    at = fold.get(f"{part}_at")
    if at is not None and int(at[column]) >= 0:
        index, number = divmod(int(at[column]), ROWS)
        row = row_at(numels[index], period, index, number)
        return Place(index, row.begin + column - row.column, row.sign)
    # All elements at this place are the same.
    for index, numel in enumerate(numels):
        for row in rows(numel, period, index):
            if row.column <= column < row.column + row.end - row.begin:
                return Place(index, row.begin + column - row.column, row.sign)
    raise ValueError(f"no parameter has place {column} of the table")


def words_of(run: Run, rank: int, step: int, place: Place) -> str:
    """Return the bucket, the parameter and the index of an element in words."""
    index = place.parameter
    spec = run.scenario.params[index]
    bucket = run.bucket_of(rank, step, index)
    element = run.element_index(index, place.element)
    sizes = {
        call["index"]: call["numel"]
        for call in run.ranks[rank].all("call", step=step)
        if call["index"] == bucket
    }
    of_bucket = "" if bucket is None else f"bucket {bucket} of {sizes[bucket]} elements, "
    name = run.parameter_name(index)
    return f"{of_bucket}parameter {name} of {math.prod(spec.shape)}, index {element}"


def _buckets_of(
    run: Run,
    rank: int,
    step: int,
    fold: dict[str, torch.Tensor],
    part: str,
    columns: torch.Tensor,
) -> str:
    """Return the buckets in which the outermost wrong values are, if these are not all."""
    at = fold.get(f"{part}_at")
    if at is None:
        return "every element of the model is wrong in the same way"
    indices = {int(place) // ROWS for place in at[columns].unique() if place >= 0}
    calls = list(run.ranks[rank].all("call", step=step))
    names = {run.parameter_name(index) for index in indices}
    wrong = [call for call in calls if names & set(call["parameters"])]
    if not wrong:
        return ""
    some = ", ".join(
        f"bucket {call['index']} ({call['numel']} elements in {len(call['parameters'])} tensors)"
        for call in sorted(wrong, key=lambda call: call["numel"])[:3]
    )
    return f"wrong in {len(wrong)} of {len(calls)} buckets, the smallest of them: {some}"


def _cause(got: torch.Tensor, values: torch.Tensor, rank: int, claims: Claims) -> str:
    """Return the known mistake that explains all of some wrong values, or an empty text."""
    for cause, predicted, slack in _mistakes(values, rank):
        on_grid = torch.equal(got.to(torch.bfloat16).double(), got)
        if cause.endswith(" float16") and on_grid:
            continue  # the bound of a float16 rounding may hold by chance
        if bool(((got - predicted).abs() <= slack).all()):
            return cause
    mean = values.mean(0)
    ratios = got / mean
    ratio = float(ratios.median())
    if math.isfinite(ratio) and torch.allclose(ratios, ratios.new_tensor(ratio), rtol=1e-4):
        return f"{ratio:.6g} times the mean: scaled by a wrong factor"
    return ""


def _mistakes(values: torch.Tensor, rank: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (cause, values that it predicts, slack)."""
    size = len(values)
    mean = values.mean(0)
    rounding = 16 * torch.finfo(torch.float32).eps * values.abs().sum(0)
    yield "zero: the elements were left out", torch.zeros_like(mean), rounding * 0
    own = values[rank]
    yield "equal to this rank's own gradient: nothing was communicated", own, rounding
    cause = "equal to this rank's own gradient divided by world_size: it was not communicated"
    yield cause, own / size, rounding
    cause = "world_size times the mean: the sum was not divided"
    yield cause, mean * size, rounding * size
    yield "the mean divided by world_size: it was divided twice", mean / size, rounding
    for name in ("float16", "bfloat16"):
        eps = torch.finfo(getattr(torch, name)).eps
        slack = (size + 2) * eps * values.abs().sum(0) / size + 1e-6
        yield f"equal to the mean rounded to {name}", mean, slack


def require_weights(run: Run, claims: Claims, found: Found, steps: list[int]) -> bool:
    """Require weighted means, folded by bucket, whose weights sum to 1 on each rank and for each.

    Within a bucket every element has the same weights, so that results repeat a table, too. The
    weights follow from the smallest values by least squares, and must explain the smallest and the
    largest, up to 16 roundings. In the warm-up they are those of the mean.
    """
    for step in steps:
        values = fed_tables(run, step)
        sums: dict[int, torch.Tensor] = {}
        for rank in range(run.world):
            if not require_all_present(run, rank, step, found):
                return False
            for call in run.ranks[rank].all("call", step=step):
                weights = _weights_of(run, rank, step, call, values, found)
                if weights is None:
                    return False
                shares = ", ".join(f"{float(weight):.3g}" for weight in weights)
                if step < claims.warmup and not found.require(
                    bool(((weights - 1 / run.world).abs() <= WEIGHT_SLACK).all()),
                    "the mean in the warm-up",
                    f"rank {rank}, step {step}, bucket {call['index']}: weights {shares}",
                ):
                    return False
                sums[call["index"]] = sums.get(call["index"], 0) + weights
        for bucket, counts in sums.items():
            times = ", ".join(f"{float(count):.3g}" for count in counts)
            if not found.require(
                bool(((counts - 1).abs() <= WEIGHT_SLACK).all()),
                "weights of each rank's gradient that add up to 1 over all ranks' results",
                f"step {step}, bucket {bucket}: the weights of ranks 0, 1, ... add up to {times}",
            ):
                return False
    return True


def _weights_of(
    run: Run, rank: int, step: int, call: dict[str, Any], values: torch.Tensor, found: Found
) -> torch.Tensor | None:
    """Return the weights of ranks in one bucket, ``[W]``; None if it is no weighted mean."""
    scenario = run.scenario
    members = tuple(int(name.removeprefix("p")) for name in call["parameters"])
    used = covered(scenario.params, scenario.period, members)
    fold = run.fold(rank, step, f"bucket{call['index']}")
    fed = values.t()[used]
    weights = torch.zeros(run.world, dtype=torch.float64)
    for _ in range(2):
        rest = (fold["low"][used] - fed @ weights).nan_to_num()
        weights += torch.linalg.lstsq(fed, rest.unsqueeze(1)).solution.squeeze(1)
    slack = 16 * torch.finfo(torch.float32).eps / 2 * fed.abs().sum(1)
    place = f"rank {rank}, step {step}, bucket {call['index']} of {call['numel']} elements"
    nearest = named_weights(weights, range(run.world))
    for part in ("low", "high"):
        wrong = ~((fold[part][used] - fed @ weights).abs() <= slack)
        if not found.require(
            not wrong.any(),
            "the same weights of the ranks' gradients for all elements of a bucket",
            f"{place}: for {int(wrong.sum())} of the {len(fed)} gradient values that it repeats, "
            f"elements do not fit the weights that fit best, {nearest}",
        ):
            return None
    is_mean = bool((weights >= -WEIGHT_SLACK).all()) and abs(weights.sum() - 1) <= WEIGHT_SLACK
    if not found.require(
        bool(is_mean and weights[rank] > WEIGHT_SLACK),
        "weights of at least 0 that sum to 1, this rank's own among them",
        f"{place}: {nearest}",
    ):
        return None
    found.checked(call["numel"])
    return weights


def require_optimizer(run: Run, claims: Claims, found: Found) -> bool:
    """Require the parameters that the optimizer of ``claims.fused`` makes of the gradients.

    The bound is that of rule 13.6. Ranks may sum in another order in another part of a bucket, and
    an optimizer may enlarge these roundings if the sum nearly cancels. So a place of the table is
    judged only while all of its gradients have the same bits: with two ranks these are all. If
    vectors have no weight decay, each parameter repeats one of two tables; the smallest and the
    largest value of a place must be in one of them.
    """
    scenario = run.scenario
    for rank in range(run.world):
        alike = torch.ones(scenario.period, dtype=torch.bool)
        tables = [
            Stepped(claims.fused, torch.nn.Parameter(torch.zeros(scenario.period)), OWN, dimensions)
            for dimensions in ((2, 1) if has_vectors_apart(claims.fused) else (2,))
        ]
        for step in range(len(scenario.steps)):
            grad = run.fold(rank, step, "grad")
            alike &= grad["low"] == grad["high"]
            if step >= claims.after:
                for stepped in tables:
                    stepped.step(grad["low"].float())
            fold = run.fold(rank, step, "parameter")
            for part in ("low", "high"):
                near = torch.stack([_is_near(fold[part], stepped) for stepped in tables])
                wrong = ~near.any(0) & alike
                if wrong.any():
                    at = int(wrong.nonzero()[0])
                    place = words_of(run, rank, step, place_of(run, fold, part, at))
                    right = " or ".join(
                        f"{float(one.parameter.detach()[at]):.9g}" for one in tables
                    )
                    found.require(
                        False,
                        f"as {claims.fused} leaves it",
                        f"rank {rank}, step {step}, {place}: {fold[part][at].item():.9g} instead "
                        f"of {right}",
                        "" if fold[part][wrong].any() else "it was not stepped at all",
                    )
                    return False
            found.checked(sum(math.prod(spec.shape) for spec in scenario.params))
    return True


def _is_near(values: torch.Tensor, stepped: Stepped) -> torch.Tensor:
    """Return a mask of the values that are within the bound of those of an optimizer."""
    bound = ROUNDINGS_OF_OPTIMIZER * torch.finfo(torch.float32).eps * stepped.changes
    return (values - stepped.parameter.detach()).abs() <= bound
