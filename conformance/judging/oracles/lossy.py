"""What must hold of a hook whose result is not the mean: how its runs are lengthened, and what is asked of them.

Let x_r be what rank r feeds, m their mean over the group and y the result. Per parameter, in float64, over the steps
after the warm-up:

    compressed          sum(y) = sum(m) once zeros have been fed long enough: what was held back has come out
    compressed(ef21)    y = m once the same has been fed long enough
    compressed(False)   ||y - m|| <= sqrt(1 - delta) mean_r ||x_r||, per bucket and step
    unbiased            the same is fed N = 96 times; for six directions u, with d_t = <y_t - m, u>,
                        |sum_t d_t| <= 6 sqrt(sum_t d_t**2) + 12 max_t |d_t|
    local               y = sum_q w_q x_q with w >= 0, the same w for every element of a bucket, each rank's own w above zero;
                        w sums to 1 on each rank, and over the ranks of a group to 1 for each q

Long enough. A compressor with ``delta`` keeps at most (1 - delta)**(1/2) of what it is given. After n steps of zeros at
most (1 - delta)**(n/2) of the residual is left; n makes that 1/1024. A residual is seldom above a few gradients, so that
what is left is below 1/256 of what was fed, or a few times that, where what is left becomes uneven and signs keep less of it than
they say. The limit is 1/16, and a divisor, a group or a residual that is wrong is off by a quarter or more.

Unbiased. sum_t d_t / sqrt(sum_t d_t**2) is self-normalized: for errors that are symmetric given the past it exceeds 6 with
probability at most 2 exp(-6**2 / 2) < 4e-8 (Efron, JASA 1969). Errors that are seldom and large are not symmetric: with an
expectation of L of them, K of size R come, and |K - L| R is to be at most 6 sqrt(K) R + 12 R. For L from 18 on that fails
with probability below 1e-7 (Poisson). So directions are taken where many elements are drawn: over all parameters, and over
each of at least 256 elements. Smaller ones are asked only of a hook whose results are near the mean in each draw (its
relative error is at most 1/4), and a bias of up to a twentieth of a typical element is left to the others. With at most
60 directions in a run the probability is below 1e-5 before any run is seen; a hook draws the same in every run (rule
3.3), so that a verdict does not vary. A bias of twice the errors' deviation along a direction is found, and one
without any deviation. A parameter, however small, that gives the same values in all draws, and not zeros, has to be the mean up to
a quarter, if elements change from draw to draw in at least 2 * 1/5 * 4/5 of them, as those do of which one of two values has
a probability of 1/5: a value that would compensate for it, drawn as often, stays out of 96 draws with a probability below
(4/5)**96 < 1e-9. Where draws change less it is not asked: a correction may come seldom.

Small gradients. All of this is relative to what is fed, so that it holds of gradients a thousandth as large: most of a model's are
below 1, and a threshold or an epsilon that is a number of its own does not show where they are not (13.10).

Local. The elements of a bucket are far more than ranks, and independent: the weights are what least squares finds, and are
exact up to rounding. A bucket of fewer than 4 elements a rank says only that each is between the least and the largest.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.gradients import REPEATED
from conformance.subjects.claims import CONTRACTION, DIFFERENCE, FEEDBACK, LOCAL, UNBIASED, Claims

LEFT, LIMIT = 1 / 1024, 1 / 16
TRIALS, SIGMAS, PEAKS = 96, 6.0, 12.0
MANY, FINE, SMALL, OFTEN = 256, 1 / 4, 1 / 20, 2 * 1 / 5 * 4 / 5  # see "Unbiased"
ROUNDINGS = 16  # units in the last place, of any dtype, that no claim speaks of

# The scenarios on which lossy results are judged over many steps; the others are as short as they are.
LONG_SCENARIOS = ("values", "small", "buckets", "dtypes", "shapes", "subgroups", "complex", "sparse", "saved", "resumed")
# Those of many buckets, which take long: at one world size, where exact results are cheap to judge at several.
ONE_WORLD_SCENARIOS = ("dtypes", "shapes")


def require(run: Run, claims: Claims, found: Found) -> None:
    """Require what the claim says of all steps after the warm-up; report the first rank and parameter of which it is not so."""
    judge, steps = _Judge(run, claims, found), range(claims.warmup, len(run.scenario.steps))
    if claims.lossy == LOCAL:
        judge.weights(steps)
    elif claims.lossy == CONTRACTION:
        judge.contraction(steps)
    elif run.scenario.name not in LONG_SCENARIOS:
        judge.size(steps)
    elif claims.lossy == FEEDBACK:
        judge.held_back_comes_out(steps)
    elif claims.lossy == DIFFERENCE:
        judge.comes_to_the_mean(steps[-1])
    elif claims.lossy == UNBIASED:
        judge.unbiased(steps)


def require_finite(run: Run, found: Found, steps: list[int]) -> None:
    """Require finite results of ``steps``."""
    for step, rank, index in product(steps, range(run.world), range(len(run.scenario.params))):
        got = run.got(rank, step, index)
        bad = "no gradient" if got is None else "" if got.isfinite().all() else f"{int((~got.isfinite()).sum())} elements are not"
        where = f"rank {rank}, step {step}, parameter {run.parameter_name(index)}"
        cause = "a division by zero, or state that keeps a NaN or an infinity of an earlier step" if bad and step else ""
        if not found.require(not bad, "finite values for finite gradients", f"{where}: {bad}", cause):
            return


def require_seen(run: Run, claims: Claims, found: Found, steps: list[int]) -> None:
    """Require of ``steps``, in which some values are not finite, that some of each rank's results are not.

    Under ``local`` a rank need not hear of another's: it is required of those that have fed some.
    """
    for step, rank in product(steps, range(run.world)):
        if claims.lossy == LOCAL and all(run.fed(rank, step, index).isfinite().all() for index in range(len(run.scenario.params))):
            continue
        results = [run.got(rank, step, index) for index in range(len(run.scenario.params))]
        seen = any(got is not None and not got.isfinite().all() for got in results)
        found.require(seen, "a result that is not finite where a gradient is not", f"rank {rank}, step {step}: all are finite")


def whole_result(run: Run, rank: int, step: int) -> torch.Tensor | None:
    """Return the result of all parameters in one vector, or None where one is missing."""
    results = [run.got(rank, step, index) for index in range(len(run.scenario.params))]
    return torch.cat([got for got in results if got is not None]) if all(got is not None for got in results) else None


def differs(run: Run, step: int, claims: Claims) -> bool:
    """Whether any rank's result of ``step`` is further from the mean than rounding explains."""
    judge = _Judge(run, claims, Found())
    for rank, index in product(range(run.world), range(len(run.scenario.params))):
        got, right = run.got(rank, step, index), judge.mean(rank, step, index)
        fed = max(judge.fed_norm(rank, [earlier], [index]) for earlier in range(step + 1))  # of which state keeps roundings
        if got is None or (got - right).norm() > ROUNDINGS * _unit(run, index) * fed:
            return True
    return False


@dataclass
class _Judge:
    """One run under one claim; each method requires something of it."""

    run: Run
    claims: Claims
    found: Found
    means: dict[tuple[tuple[int, ...], int, int], torch.Tensor] = field(default_factory=dict)

    def group(self, rank: int) -> tuple[int, ...]:
        return tuple(range(self.run.world)) if self.claims.world_only else self.run.group(rank)

    def mean(self, rank: int, step: int, index: int) -> torch.Tensor:
        scenario, group = self.run.scenario, self.group(rank)
        if (kind := scenario.steps[step]) in REPEATED and scenario.params[index].layout != "sparse":
            step = scenario.steps.index(kind)  # the same in all of them
        if (group, step, index) not in self.means:
            self.means[group, step, index] = mean(self.run, rank, step, index, group)
        return self.means[group, step, index]

    def held_back_comes_out(self, steps: range) -> None:
        fed = [step for step in steps if self.run.scenario.steps[step] != "zero_all"]
        for rank, index, where in self.each():
            got = self.got(rank, index, steps)
            if got is None:
                return
            total, means = got.sum(0), torch.stack([self.mean(rank, step, index) for step in fed]).sum(0)
            off = float((total - means).norm()) / self.fed_norm(rank, fed, [index])
            cause = ""
            if off > LIMIT:
                own = torch.stack([self.run.fed(rank, step, index) for step in fed]).sum(0)
                cause = _cause(total, means, own, len(self.group(rank)), feedback=True)
            zeros = len(steps) - len(fed)
            expected = f"results of {len(fed)} steps, and of {zeros} steps of zeros after them, that sum to the means, within {LIMIT:g}"
            if not self.found.require(off <= LIMIT, expected, f"{where}: their sum is off by {off:.3g} of what was fed", cause):
                return
            self.found.checked(total.numel(), off / LIMIT)

    def comes_to_the_mean(self, last: int) -> None:
        for rank, index, where in self.each():
            got = self.got(rank, index, range(last, last + 1))
            if got is None:
                return
            right = self.mean(rank, last, index)
            off = float((got[0] - right).norm()) / self.fed_norm(rank, [last], [index])
            cause = _cause(got[0], right, self.run.fed(rank, last, index), len(self.group(rank))) if off > LIMIT else ""
            if not self.found.require(
                off <= LIMIT, f"the mean, within {LIMIT:g}, of what was fed again and again", f"{where}: off by {off:.3g}", cause
            ):
                return
            self.found.checked(right.numel(), off / LIMIT)

    def contraction(self, steps: range) -> None:
        indices = {self.run.parameter_name(i): i for i in range(len(self.run.scenario.params))}
        share = math.sqrt(1 - self.claims.delta)
        for step, rank in product(steps, range(self.run.world)):
            for call in self.run.ranks[rank].all("call", step=step):
                members = [indices[name] for name in call["parameters"] if name in indices and self.run.receives(rank, step, indices[name])]
                if not members:
                    continue
                results = [self.run.got(rank, step, i) for i in members]
                where = f"rank {rank}, step {step}, bucket {call['index']}"
                if not self.found.require(all(got is not None for got in results), "a gradient", f"{where}: a parameter has none"):
                    return
                total = torch.cat([got for got in results if got is not None])
                right = torch.cat([self.mean(rank, step, i) for i in members])
                off, fed = float((total - right).norm()), self.fed_norm(rank, [step], members)
                bound = (share + ROUNDINGS * max(_unit(self.run, i) for i in members)) * fed
                cause = ""
                if not off <= bound:
                    own = torch.cat([self.run.fed(rank, step, i) for i in members])
                    cause = _cause(total, right, own, len(self.group(rank)))
                expected = f"||result - mean|| <= sqrt(1 - {self.claims.delta:g}) ||gradient|| = {bound:.3g}"
                if not self.found.require(off <= bound, expected, f"{where}: {off:.3g}", cause):
                    return
                self.found.checked(total.numel(), off / bound if bound else None)

    def unbiased(self, steps: range) -> None:
        numels = [math.prod(spec.shape) for spec in self.run.scenario.params]
        for rank in range(self.run.world):
            results = {index: self.got(rank, index, steps) for index, numel in enumerate(numels) if numel}
            if any(got is None for got in results.values()):
                return
            errors, means = {}, {}
            for index, got in results.items():
                means[index] = torch.stack([self.mean(rank, step, index) for step in steps])
                errors[index] = got - means[index]  # type: ignore[operator]
            whole, right = torch.cat(list(errors.values()), dim=1), torch.cat(list(means.values()), dim=1)
            fine = float(whole.norm()) <= FINE * float(right.norm())
            typical = float(right.norm()) / math.sqrt(right.numel())
            often = float((whole[1:] != whole[:-1]).double().mean()) >= OFTEN
            unit = max(_unit(self.run, index) for index in results)
            if not self.cancel_out(whole, right[0], f"rank {rank}, all parameters", ROUNDINGS * unit * typical):
                return
            for index in results:
                got = errors[index] + means[index]
                if often and (means[index] == means[index][0]).all() and (got == got[0]).all() and got[0].any():
                    off = float(errors[index][0].norm()) / float(means[index][0].norm())
                    same = f"rank {rank}, parameter {self.run.parameter_name(index)}: the same {off:.3g} off in each of {len(got)} draws"
                    if not self.found.require(off <= FINE, "the mean, where results do not vary", same):
                        return
                slack = ROUNDINGS * _unit(self.run, index) + (0 if numels[index] >= MANY else SMALL)
                where = f"rank {rank}, parameter {self.run.parameter_name(index)}"
                if (fine or numels[index] >= MANY) and not self.cancel_out(errors[index], means[index][0], where, slack * typical):
                    return

    def cancel_out(self, errors: torch.Tensor, right: torch.Tensor, where: str, slack: float) -> bool:
        """Require that errors ``[draws, n]`` cancel out, up to ``slack`` for each element."""
        for u in _directions(right):
            along = errors @ u
            total, peak = abs(float(along.sum())), float(along.abs().max())
            draws, spread = len(errors), math.sqrt(float(along.square().sum()))
            bound = SIGMAS * spread + PEAKS * peak + draws * slack * math.sqrt(len(u))
            off = total / draws / max(float(right.norm()), 1e-300)
            cause = _cause((errors + right).sum(0), right * draws, torch.zeros_like(right), 1) if total > bound else ""
            if not self.found.require(
                total <= bound,
                f"errors of {draws} draws that cancel out: a sum of at most {bound:.3g}",
                f"{where}: {total:.3g}; on average the result is off by {off:.3g} of the mean",
                cause,
            ):
                return False
            self.found.checked(draws, total / bound if bound else None)
        return True

    def weights(self, steps: range) -> None:
        for step in steps:
            kind = self.run.scenario.steps[step]
            if kind in ("zero_all", "nan", "inf", "minus_zero") or kind.startswith("tiny"):
                continue
            tables: dict[int, list[torch.Tensor]] = {}
            training = [rank for rank in range(self.run.world) if step < self.run.scenario.inputs_of(rank, self.run.world)]
            for rank in training:
                for call in self.run.ranks[rank].all("call", step=step):
                    weights = self.weights_of(rank, step, call)
                    if weights is None:
                        return
                    tables.setdefault(call["index"], []).append(weights)
            for bucket, rows in tables.items():
                counted = torch.stack(rows).sum(0)
                unseen = len(training) < self.run.world
                even = bool(unseen or counted.isnan().any() or ((counted - 1).abs() <= 1e-3).all())
                said = ", ".join(f"{float(count):.3g}" for count in counted)
                where = f"step {step}, bucket {bucket}"
                if not self.found.require(even, "every rank's gradient counts once over all ranks", f"{where}: they count {said} times"):
                    return

    def weights_of(self, rank: int, step: int, call: dict[str, Any]) -> torch.Tensor | None:
        """Return the weights ``[W]`` of ranks in a bucket of ``rank``; NaN where it is too small to tell.

        None, with a failure, where it is no weighted mean.
        """
        names = {self.run.parameter_name(i): i for i in range(len(self.run.scenario.params))}
        indices = [names[name] for name in call["parameters"] if math.prod(self.run.scenario.params[names[name]].shape)]
        indices = [index for index in indices if self.run.receives(rank, step, index)]
        weights, group = torch.full((self.run.world,), math.nan, dtype=torch.float64), self.group(rank)
        if not indices:
            return weights
        results = [self.run.got(rank, step, i) for i in indices]
        where = f"rank {rank}, step {step}, bucket {call['index']}"
        if not self.found.require(all(got is not None for got in results), "a gradient", f"{where}: a parameter has none"):
            return None
        got = torch.cat([result for result in results if result is not None])
        unit = max(_unit(self.run, i) for i in indices)
        fed = torch.stack([torch.cat([self.run.fed(r, step, i) for i in indices]) for r in group], dim=1)
        slack = ROUNDINGS * unit * fed.abs().sum(1)
        outside = (got > fed.amax(1) + slack) | (got < fed.amin(1) - slack)
        if not self.found.require(
            not outside.any(),
            "between the least and the largest of ranks",
            f"{where}: {int(outside.sum())} of {len(got)} elements lie outside",
        ):
            return None
        if len(got) < 4 * len(group) or not all(self.run.feeds(r, step, i) for r in group for i in indices):
            return weights  # too few elements to tell, or a rank of which the weight does not show
        solved = _solve(fed, got)
        wrong = (got - fed @ solved).abs() > slack
        said = ", ".join(f"{float(w):.3g} of rank {r}" for r, w in zip(group, solved, strict=True))
        if not self.found.require(
            not wrong.any(),
            "one weighted mean of ranks' gradients for all elements of a bucket",
            f"{where}: {int(wrong.sum())} of {len(got)} elements are none; nearest is {said}",
        ):
            return None
        right = bool((solved >= -1e-3).all() and abs(solved.sum() - 1) <= 1e-3 and solved[group.index(rank)] > 1e-3)
        if not self.found.require(right, "weights of at least 0 that sum to 1, this rank's own among them", f"{where}: {said}"):
            return None
        self.found.checked(len(got))
        weights.zero_()
        weights[list(group)] = solved
        return weights

    def size(self, steps: range) -> None:
        """What can be said of a few steps: results are there, finite, and no larger than compression explains.

        An element may get the norm of its whole bucket, where that is the scale.
        """
        for rank, index, where in self.each():
            got = self.got(rank, index, steps)
            if got is None:
                return
            fed = sum(self.fed_norm(rank, [step], self.beside(rank, step, index)) for step in steps)
            size = float(got.sum(0).norm())
            numel = got.size(1)
            bound = max(2.0, math.sqrt(numel)) * fed
            if not self.found.require(size <= bound, f"results of a norm of at most {bound:.3g}", f"{where}: {size:.3g}"):
                return
            self.found.checked(numel)

    def beside(self, rank: int, step: int, index: int) -> list[int]:
        """Return the parameters of the bucket that held one."""
        name, indices = self.run.parameter_name(index), range(len(self.run.scenario.params))
        calls = (set(call["parameters"]) for call in self.run.ranks[rank].all("call", step=step))
        names = next((names for names in calls if name in names), {name})
        return [other for other in indices if self.run.parameter_name(other) in names]

    def each(self) -> Iterator[tuple[int, int, str]]:
        for rank, index in product(range(self.run.world), range(len(self.run.scenario.params))):
            if math.prod(self.run.scenario.params[index].shape):
                yield rank, index, f"rank {rank}, parameter {self.run.parameter_name(index)}"

    def got(self, rank: int, index: int, steps: range) -> torch.Tensor | None:
        """Return the results ``[steps, numel]`` of the steps in which it gets one, or None, with a failure, where one is missing
        or not finite."""
        receiving = [step for step in steps if self.run.receives(rank, step, index)]
        results = [self.run.got(rank, step, index) for step in receiving]
        for step, got in zip(receiving, results, strict=True):
            where = f"rank {rank}, step {step}, parameter {self.run.parameter_name(index)}"
            if not self.found.require(got is not None, "a gradient", f"{where}: none"):
                return None
            if not self.found.require(bool(got.isfinite().all()), "finite values for finite gradients", f"{where}: some are not"):  # type: ignore[union-attr]
                return None
        return torch.stack([got for got in results if got is not None]) if results else torch.zeros(0, 1)

    def fed_norm(self, rank: int, steps: "list[int] | range", indices: list[int]) -> float:
        """The root of the sum over steps of the square of mean_r ||x_r||, over some parameters."""
        group = self.group(rank)
        total = 0.0
        for step in steps:
            norms = [math.sqrt(sum(float(self.run.fed(r, step, i).square().sum()) for i in indices)) for r in group]
            total += (sum(norms) / len(norms)) ** 2
        return math.sqrt(total)


def _solve(fed: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return the weights ``w`` of least squares, ``fed @ w = got`` with every row scaled to its largest element.

    Solved once more for what is left over: the first solution may be off by hundreds of units in the last place, which a
    float64 result is not (Higham, Accuracy and Stability of Numerical Algorithms, section 20.5: iterative refinement).
    """
    scale = 1 / fed.abs().amax(1).clamp(min=1e-30).unsqueeze(1)
    weights = torch.zeros(fed.size(1), dtype=torch.float64)
    for _ in range(2):
        weights += torch.linalg.lstsq(fed * scale, (got - fed @ weights).unsqueeze(1) * scale).solution.squeeze(1)
    return weights


def _unit(run: Run, index: int) -> float:
    dtype = run.scenario.params[index].dtype.replace("complex64", "float32").replace("complex128", "float64")
    return torch.finfo(getattr(torch, dtype)).eps / 2


def _directions(right: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield six directions of length 1: along the mean, its signs, all ones, and three that a hash draws."""
    n = right.numel()
    rows = [right, right.sign(), torch.ones_like(right)]
    bits = torch.arange(1, n + 1)
    rows += [((bits * odd) % 127 < 63).double() * 2 - 1 for odd in (37, 59, 83)]
    for row in rows:
        yield row / max(float(row.norm()), 1e-300)


def _cause(total: torch.Tensor, means: torch.Tensor, own: torch.Tensor, size: int, feedback: bool = False) -> str:
    """The known mistake behind a sum of results, or ''."""
    square = float(means.square().sum())
    ratio = float(total @ means) / square if square else float("nan")
    near = float((total - ratio * means).norm()) <= LIMIT * float(means.norm())
    if size > 1 and float((total - own).norm()) <= LIMIT * float(own.norm()):
        said = "nothing was communicated"
        return f"equal to this rank's own gradients: {said}{', or its residual is taken against what it received' if feedback else ''}"
    if size > 1 and near and abs(ratio - size) <= LIMIT * size:
        return "world_size times the mean: the sum was not divided"
    if size > 1 and near and abs(ratio - 1 / size) <= LIMIT:
        return "the mean divided by world_size: it was divided twice"
    if near:
        return f"{ratio:.3g} times the mean"
    if abs(ratio - 1) <= LIMIT or not math.isfinite(ratio):
        return ""
    if 0 < ratio < 1 and feedback:
        return f"only {ratio:.2g} of the mean comes out: what is left out of a step is lost, or not added to the next"
    return f"along the mean {ratio:.2g} times as long as it, and not in its direction"
