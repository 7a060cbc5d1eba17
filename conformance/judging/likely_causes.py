"""Name the likely cause of a wrong step: known mistakes leave patterns of their own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from conformance.judging.oracles.mean import compare, expected, mean, precision
from conformance.records.run import Run
from conformance.subjects.claims import Claims


@dataclass
class _Rounded:
    """The mean, rounded to ``dtype`` at some place of the computation.

    Attributes:
        values: the mean itself.
        dtype: the dtype.
        on_grid: the result itself is a value of that dtype.
    """

    values: torch.Tensor
    dtype: torch.dtype
    on_grid: bool = False


# The values that a mistake predicts for a parameter of a rank: a function of both.
Pattern = Callable[[int, int], torch.Tensor | _Rounded]

# The results of one step by rank and parameter.
Results = dict[tuple[int, int], torch.Tensor]


def diagnose(run: Run, step: int, claims: Claims) -> str:
    """Return the known mistake that explains every element of ``step``, or the place of the errors.

    The text is empty if neither is known.
    """
    results = _results(run, step)
    if results is None:
        return "a parameter has no gradient at all on at least one rank"
    if lost := _lost_special_values(run, step, results):
        return lost
    for cause, pattern in _patterns(run, step, claims):
        if all(
            _is_alike(run, got, pattern(rank, index), rank, step, index, claims)
            for (rank, index), got in results.items()
        ):
            return cause
    if _is_scaled(run, step, claims):
        return (
            "within the roundings of a factor before the sum and another after it, such as "
            "1 / sqrt(world_size): if they are meant, claim scaled"
        )
    ratio = _common_ratio(run, step, results)
    return ratio or _common_offset(run, step, results) or _location(run, step, claims)


def _is_scaled(run: Run, step: int, claims: Claims) -> bool:
    """Whether the claim ``scaled`` would make the step right."""
    if claims.scaled or claims.sum or claims.lossy:
        return False
    return compare(run, step, replace(claims, scaled=True)).mismatch is None


def _lost_special_values(run: Run, step: int, results: Results) -> str:
    """Return the ranks whose NaN or infinities are finite in the results; empty if none are."""
    lost: set[int] = set()
    kept: set[int] = set()
    for (rank, index), got in results.items():
        for other in run.group(rank):
            special = ~run.fed(other, step, index).isfinite()
            if special.any():
                is_finite = got[special].isfinite()
                lost.update([other] * bool(is_finite.any()))
                kept.update([other] * bool((~is_finite).any()))
    if not lost:
        return ""
    others = ", ".join(map(str, sorted(kept - lost)))
    beside = f"; those of rank {others} are kept" if others else ""
    return f"NaN or infinities of rank {', '.join(map(str, sorted(lost)))} are lost{beside}"


def _results(run: Run, step: int) -> Results | None:
    """Return the results of every nonempty parameter that gets one, or None if one is missing."""
    results = {}
    for rank in range(run.world):
        for index, spec in enumerate(run.scenario.params):
            if not torch.Size(spec.shape).numel() or not run.receives(rank, step, index):
                continue
            got = run.got(rank, step, index)
            if got is None:
                return None
            results[rank, index] = got
    return results


def _patterns(run: Run, step: int, claims: Claims) -> Iterator[tuple[str, Pattern]]:
    """Yield (cause, pattern), the more specific causes first."""
    yield from _patterns_of_claims(run, step, claims)
    yield from _patterns_of_scenario(run, step)
    yield from _patterns_of_communication(run, step)
    yield from _patterns_of_values(run, step)


def _patterns_of_claims(run: Run, step: int, claims: Claims) -> Iterator[tuple[str, Pattern]]:
    def right(rank: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index)

    if claims.sum:
        yield "equal to the mean: the subject claims the sum, but divides", right
    if run.scenario.groups and claims.world_only:
        cause = (
            "equal to the mean over the model's own group, although the subject claims world_only"
        )
        yield cause, right


def _patterns_of_scenario(run: Run, step: int) -> Iterator[tuple[str, Pattern]]:
    def right(rank: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index)

    def feeding(rank: int, index: int) -> int:
        return sum(run.feeds(other, step, index) for other in run.group(rank))

    if run.scenario.groups:
        world = tuple(range(run.world))
        yield (
            "equal to the mean over WORLD: the given process group was not used",
            lambda rank, index: mean(run, rank, step, index, world),
        )
        yield (
            "equal to the sum over the group divided by the size of WORLD: "
            "the divisor ignores the group",
            lambda rank, index: right(rank, index) * len(run.group(rank)) / run.world,
        )
    weights = run.scenario.microbatch_weights
    for weight in set(weights) - {1}:
        batch = (
            "the last micro-batch" if weight == weights[-1] else "one of the first micro-batches"
        )
        yield (
            f"equal to the mean of {batch} alone: gradients did not accumulate",
            lambda rank, index, weight=weight: right(rank, index) * weight,  # type: ignore[misc]
        )
    if run.scenario.ddp.find_unused_parameters or run.scenario.uneven:
        yield (
            "equal to the mean over only the ranks that have a gradient: divide by the number of "
            "all ranks",
            lambda rank, index: (
                right(rank, index) * len(run.group(rank)) / max(1, feeding(rank, index))
            ),
        )


def _patterns_of_communication(run: Run, step: int) -> Iterator[tuple[str, Pattern]]:
    def right(rank: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index)

    def own(rank: int, index: int) -> torch.Tensor:
        return run.fed(rank, step, index)

    yield "equal to this rank's own gradient: nothing was communicated", own
    yield (
        "equal to rank 0's gradient on every rank: it was broadcast, not reduced",
        lambda rank, index: own(run.group(rank)[0], index),
    )
    yield (
        "every element is world_size times the mean: the sum was not divided",
        lambda rank, index: right(rank, index) * len(run.group(rank)),
    )
    yield (
        "every element is the mean divided by world_size: it was divided twice",
        lambda rank, index: right(rank, index) / len(run.group(rank)),
    )
    yield (
        "equal to this rank's own gradient divided by world_size: "
        "it was divided, but nothing was communicated",
        lambda rank, index: own(rank, index) / len(run.group(rank)),
    )


def _patterns_of_values(run: Run, step: int) -> Iterator[tuple[str, Pattern]]:
    def right(rank: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index)

    yield "every element has the wrong sign", lambda rank, index: -right(rank, index)
    yield "every element is zero", lambda rank, index: torch.zeros_like(right(rank, index))
    if run.knows(step - 1):
        yield (
            "equal to the previous step's mean: the result is one step late",
            lambda rank, index: mean(run, rank, step - 1, index),
        )
    if any(spec.dtype in ("float64", "complex128") for spec in run.scenario.params):
        yield (
            "equal to the mean rounded to float32",
            lambda rank, index: _Rounded(right(rank, index), torch.float32),
        )
    # float16 is tried between the two: a result that lies on bfloat16's grid was rounded to it, but
    # the bound of a bfloat16 rounding elsewhere covers a float16 rounding, too.
    yield (
        "equal to the mean rounded to bfloat16",
        lambda rank, index: _Rounded(right(rank, index), torch.bfloat16, on_grid=True),
    )
    yield (
        "equal to the mean rounded to float16",
        lambda rank, index: _Rounded(right(rank, index), torch.float16),
    )
    yield (
        "equal to the mean rounded to bfloat16",
        lambda rank, index: _Rounded(right(rank, index), torch.bfloat16),
    )
    yield (
        "equal to the mean with its fraction cut off: it went through an integer dtype",
        lambda rank, index: right(rank, index).trunc(),
    )


def _is_alike(
    run: Run,
    got: torch.Tensor,
    predicted: torch.Tensor | _Rounded,
    rank: int,
    step: int,
    index: int,
    claims: Claims,
) -> bool:
    """Return whether a result has the values that a mistake predicts, up to rounding."""
    if isinstance(predicted, _Rounded):
        # Crafted values survive a rounding: only random ones show it.
        if run.scenario.steps[step] != "normal":
            return False
        info = torch.finfo(predicted.dtype)
        _, _, values = expected(run, rank, step, index, claims)
        if predicted.on_grid and not torch.equal(got.to(predicted.dtype).double(), got):
            return False
        bound = (len(values) + 2) * info.eps * values.abs().sum(0) / len(values)
        return bool(((got - predicted.values).abs() <= bound + info.tiny).all())
    unit, _, _ = precision(run.scenario.params[index].dtype, claims)
    slack = 8 * run.world * unit * predicted.abs()
    near = (got - predicted).abs() <= slack
    same = (got == predicted) | (got.isnan() & predicted.isnan()) | near
    return bool(same.all())


def _common_ratio(run: Run, step: int, results: Results) -> str:
    """Return a text on the one factor between results and means, or an empty one."""
    first: float | None = None
    for rank in sorted({rank for rank, _ in results}):
        of_rank = {index: value for (other, index), value in results.items() if other == rank}
        values = torch.cat(list(of_rank.values()))
        means = torch.cat([mean(run, rank, step, index) for index in of_rank])
        used = (means != 0) & means.isfinite() & values.isfinite()
        if not used.any():
            return ""
        ratios = values[used] / means[used]
        if first is None:
            first = ratios[0].item()
        same = torch.allclose(ratios, torch.full_like(ratios, first), rtol=1e-4, atol=0.0)
        if not same or abs(first - 1) < 1e-3:
            return ""
    return f"every element is {first:.6g} times the mean: it was scaled by a wrong factor"


def _common_offset(run: Run, step: int, results: Results) -> str:
    """Return a text on the one difference between results and means, or an empty one."""
    level = run.scenario.initial_value  # of every element of every parameter
    means = {key: mean(run, key[0], step, key[1]) for key in results}
    offsets = torch.cat([value - means[key] for key, value in results.items()])
    first = float(offsets[0]) if len(offsets) else 0.0
    if not level or not first or not any(value.any() for value in means.values()):
        return ""
    if not torch.allclose(offsets, torch.full_like(offsets, first), rtol=1e-2, atol=0.0):
        return ""
    return (
        f"every element is off by {first:.4g}, {first / level:.4g} times what the parameters hold: "
        "they are mixed into the gradients, as by a weight decay"
    )


def _location(run: Run, step: int, claims: Claims) -> str:
    """Return the ranks, buckets or elements that are wrong, if others are right."""
    wrong_ranks = [rank for rank in range(run.world) if compare(run, step, claims, [rank]).mismatch]
    parts = []
    if len(wrong_ranks) < run.world:
        ranks = ", ".join(map(str, wrong_ranks))
        parts.append(f"right on the other ranks, wrong on rank {ranks}")
    parts.append(_location_in_buckets(run, wrong_ranks[0], step, claims))
    return "; ".join(filter(None, parts))


def _location_in_buckets(run: Run, rank: int, step: int, claims: Claims) -> str:
    calls = sorted(run.ranks[rank].all("call", step=step), key=lambda call: call["index"])
    wrong = [
        _wrong_elements(run, rank, step, index, claims) for index in range(len(run.scenario.params))
    ]
    bad_calls = [call for call in calls if any(wrong[i].any() for i in _indices(run, call))]
    if len(calls) > 1 and len(bad_calls) < len(calls):
        buckets = ", ".join(str(call["index"]) for call in bad_calls)
        if bad_calls == calls[-1:]:
            buckets = "the last"
        return f"right in all buckets but {buckets}"
    for call in bad_calls:
        flat = torch.cat([wrong[i] for i in _indices(run, call)])
        tail = len(flat) % len(run.group(rank))
        # All of a bucket that has fewer elements than there are ranks is no tail.
        if 0 < tail < len(flat) and flat[-tail:].any() and not flat[:-tail].any():
            return (
                "right but for the last numel % world_size elements of the bucket: "
                "the uneven tail was left out"
            )
        count = int(flat.sum())
        if flat[-count:].all() and not flat.all():
            return f"right but for the last {count} elements of the bucket"
    return ""


def _indices(run: Run, call: dict[str, Any]) -> list[int]:
    """Return the parameters of a call's bucket, in the bucket's order."""
    indices = {run.parameter_name(i): i for i in range(len(run.scenario.params))}
    return [indices[name] for name in call["parameters"] if name in indices]


def _wrong_elements(run: Run, rank: int, step: int, index: int, claims: Claims) -> torch.Tensor:
    right, bound, _ = expected(run, rank, step, index, claims)
    got = run.got(rank, step, index)
    if got is None or got.shape != right.shape:
        return torch.full_like(right, run.receives(rank, step, index), dtype=torch.bool)
    near = (got - right).abs() <= bound
    return ~((got == right) | (got.isnan() & right.isnan()) | near)


def norm_ratios(run: Run, steps: list[int]) -> str:
    """Return the ratio of norms, result over mean, of each step on rank 0.

    2.0, 0.5 and 1 / W are the signs of the commonest mistakes.
    """
    return " ".join(f"{_norm_ratio(run, 0, step):.4g}" for step in steps)


def _norm_ratio(run: Run, rank: int, step: int) -> float:
    indices = range(len(run.scenario.params))
    results = [run.got(rank, step, index) for index in indices]
    size = sum(float(value.square().sum()) for value in results if value is not None) ** 0.5
    size_of_mean = torch.cat([mean(run, rank, step, index) for index in indices]).norm().item()
    return size / size_of_mean if size_of_mean else float("nan")
