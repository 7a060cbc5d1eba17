"""Known mistakes by the pattern they leave: from a wrong step to one line that names the likely cause."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from conformance.judging.oracles.mean import compare, expected, mean, precision
from conformance.records.run import Run
from conformance.subjects.claims import Claims


def diagnose(run: Run, step: int, claims: Claims) -> str:
    """Return the known mistake that explains every element of ``step``, or where it goes wrong, or ''."""
    ranks = list(range(run.world))
    indices = [i for i, spec in enumerate(run.scenario.params) if torch.Size(spec.shape).numel()]
    receiving = [(r, i) for r in ranks for i in indices if run.receives(r, step, i)]
    got = {(r, i): value for r, i in receiving if (value := run.got(r, step, i)) is not None}
    if len(got) < len(receiving):
        return "a parameter has no gradient at all on at least one rank"
    for cause, pattern in _patterns(run, step, claims):
        if all(_alike(run, got[r, i], pattern(r, i), r, step, i, claims) for r, i in receiving):
            return cause
    return _ratio(run, step, got) or _offset(run, step, got) or _place(run, step, claims)


def _patterns(run: Run, step: int, claims: Claims) -> Iterator[tuple[str, "Pattern"]]:
    """Yield (cause, function of rank and parameter that gives the values it predicts)."""

    def group(rank: int) -> tuple[int, ...]:
        return run.group(rank)

    def fed(rank: int, index: int) -> torch.Tensor:
        return run.fed(rank, step, index)

    def right(rank: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index)

    def multiple(share: int, rank: int, index: int) -> torch.Tensor:
        return right(rank, index) * share

    if claims.sum:
        yield "equal to the mean: it claims the sum, but divides", right
    if run.scenario.groups and claims.world_only:
        yield "equal to the mean over the model's own group: it claims world_only, but uses the group", right
    if run.scenario.groups:
        world = tuple(range(run.world))
        yield "equal to the mean over WORLD: the process group that it was given was not used", lambda r, i: mean(run, r, step, i, world)
        yield (
            "equal to the sum over the group divided by the size of WORLD: the divisor ignores the group",
            lambda r, i: right(r, i) * len(group(r)) / run.world,
        )
    for share in set(run.scenario.microbatch_weights) - {1}:
        last = share == run.scenario.microbatch_weights[-1]
        which = "the last micro-batch" if last else "one of the first micro-batches"
        yield f"equal to the mean of {which} alone: gradients did not accumulate", functools.partial(multiple, share)
    if run.scenario.ddp.find_unused_parameters or run.scenario.uneven:
        yield (
            "equal to the mean over the ranks that have a gradient: the zeros of the others count too",
            lambda r, i: right(r, i) * len(group(r)) / max(1, sum(run.feeds(other, step, i) for other in group(r))),
        )
    yield "equal to this rank's own gradient: nothing was communicated", fed
    yield "equal to rank 0's gradient on every rank: it was broadcast, not reduced", lambda r, i: fed(group(r)[0], i)
    yield "every element is world_size times the mean: the sum was not divided", lambda r, i: right(r, i) * len(group(r))
    yield "every element is the mean divided by world_size: it was divided twice", lambda r, i: right(r, i) / len(group(r))
    yield (
        "equal to this rank's own gradient divided by world_size: it was divided, but nothing was communicated",
        lambda r, i: fed(r, i) / len(group(r)),
    )
    yield "every element has the wrong sign", lambda r, i: -right(r, i)
    yield "every element is zero", lambda r, i: torch.zeros_like(right(r, i))
    if run.knows(step - 1):
        yield "equal to the previous step's mean: the result is one step late", lambda r, i: mean(run, r, step - 1, i)
    yield "equal to the mean rounded to bfloat16", lambda r, i: _Rounded(right(r, i), torch.bfloat16, on_grid=True)
    yield "equal to the mean rounded to float16", lambda r, i: _Rounded(right(r, i), torch.float16)
    yield "equal to the mean rounded to bfloat16", lambda r, i: _Rounded(right(r, i), torch.bfloat16)
    yield "equal to the mean with its fraction cut off: it went through an integer dtype", lambda r, i: right(r, i).trunc()


@dataclass
class _Rounded:
    """The mean, somewhere rounded to ``dtype``; ``on_grid`` where the result itself is a value of that dtype."""

    values: torch.Tensor
    dtype: torch.dtype
    on_grid: bool = False


Pattern = Callable[[int, int], "torch.Tensor | _Rounded"]


def _alike(run: Run, got: torch.Tensor, predicted: "torch.Tensor | _Rounded", rank: int, step: int, index: int, claims: Claims) -> bool:
    """Whether ``got`` is what a mistake predicts, within what rounding can explain."""
    if isinstance(predicted, _Rounded):
        if run.scenario.steps[step] not in ("normal",):
            return False
        info = torch.finfo(predicted.dtype)
        _, _, values = expected(run, rank, step, index, claims)
        if predicted.on_grid and not torch.equal(got.to(predicted.dtype).double(), got):
            return False
        bound = (len(values) + 2) * info.eps * values.abs().sum(0) / len(values)
        return bool(((got - predicted.values).abs() <= bound + info.tiny).all())
    unit, _, _ = precision(run.scenario.params[index].dtype, claims)
    slack = 8 * run.world * unit * predicted.abs()
    same = (got == predicted) | (got.isnan() & predicted.isnan()) | ((got - predicted).abs() <= slack)
    return bool(same.all())


def _ratio(run: Run, step: int, got: dict[tuple[int, int], torch.Tensor]) -> str:
    """One factor between result and mean, when there is one."""
    for rank in sorted({rank for rank, _ in got}):
        results = torch.cat([value for (r, _), value in got.items() if r == rank])
        means = torch.cat([mean(run, rank, step, i) for (r, i) in got if r == rank])
        used = (means != 0) & means.isfinite() & results.isfinite()
        if not used.any():
            return ""
        ratios = results[used] / means[used]
        if rank == 0:
            first = ratios[0].item()
        if not torch.allclose(ratios, torch.full_like(ratios, first), rtol=1e-4, atol=0.0) or abs(first - 1) < 1e-3:
            return ""
    return f"every element is {first:.6g} times the mean: it was scaled by a wrong factor"


def _offset(run: Run, step: int, got: dict[tuple[int, int], torch.Tensor]) -> str:
    """One difference between result and mean, when there is one: all parameters hold the same."""
    means = [mean(run, r, step, i) for r, i in got]
    off, level = torch.cat([value - right for value, right in zip(got.values(), means, strict=True)]), run.scenario.initial_value
    first = float(off[0]) if len(off) else 0.0
    if (
        not level
        or not first
        or not any(right.any() for right in means)
        or not torch.allclose(off, torch.full_like(off, first), rtol=1e-2, atol=0.0)
    ):
        return ""
    return (
        f"every element is off by {first:.4g}, {first / level:.4g} times what the parameters hold: they are mixed into the gradients, "
        "as by a weight decay"
    )


def _place(run: Run, step: int, claims: Claims) -> str:
    """Where a step is wrong, when it is right elsewhere."""
    wrong_ranks = [r for r in range(run.world) if compare(run, step, claims, [r]).mismatch]
    said = ""
    if len(wrong_ranks) < run.world:
        said = f"right on the other ranks, wrong on rank {', '.join(map(str, wrong_ranks))}"
    rank = wrong_ranks[0]
    calls = sorted(run.ranks[rank].all("call", step=step), key=lambda call: call["index"])
    wrong = {i: _wrong_elements(run, rank, step, i, claims) for i in range(len(run.scenario.params))}
    bad_buckets = [c for c in calls if any(wrong[i].any() for i in _indices(run, c))]
    if len(calls) > 1 and len(bad_buckets) < len(calls):
        last = bad_buckets == calls[-1:]
        names = "the last" if last else ", ".join(str(c["index"]) for c in bad_buckets)
        return _join(said, f"right in all buckets but {names}")
    for call in bad_buckets:
        flat = torch.cat([wrong[i] for i in _indices(run, call)])
        size = len(run.group(rank))
        tail = len(flat) % size
        if tail and flat[-tail:].any() and not flat[:-tail].any():
            return _join(said, "right but for the last numel % world_size elements of the bucket: the uneven tail was left out")
        if flat[-1] and not flat[: int(flat.nonzero()[0])].any() and flat[int(flat.nonzero()[0]) :].all() and not flat.all():
            return _join(said, f"right but for the last {int(flat.sum())} elements of the bucket")
    return said


def _indices(run: Run, call: dict[str, object]) -> list[int]:
    names = {run.parameter_name(i): i for i in range(len(run.scenario.params))}
    parameters = call["parameters"]
    assert isinstance(parameters, list)
    return [names[name] for name in parameters if name in names]


def _wrong_elements(run: Run, rank: int, step: int, index: int, claims: Claims) -> torch.Tensor:
    right, bound, _ = expected(run, rank, step, index, claims)
    got = run.got(rank, step, index)
    if got is None or got.shape != right.shape:
        return torch.full_like(right, run.receives(rank, step, index), dtype=torch.bool)
    return ~((got == right) | (got.isnan() & right.isnan()) | ((got - right).abs() <= bound))


def _join(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _norms(run: Run, rank: int, step: int) -> float:
    got = [run.got(rank, step, i) for i in range(len(run.scenario.params))]
    results = sum(float(value.square().sum()) for value in got if value is not None) ** 0.5
    means = torch.cat([mean(run, rank, step, i) for i in range(len(run.scenario.params))]).norm().item()
    return results / means if means else float("nan")


def norm_ratios(run: Run, steps: list[int]) -> str:
    """The ratio of norms, result over mean, per step on rank 0: 2.0, 0.5 and 1/W name the commonest bugs."""
    return " ".join(f"{_norms(run, 0, step):.4g}" for step in steps)
