"""What must hold of a hook whose result is not the mean: how its runs are lengthened, and what is asked of them.

Let x_r be what rank r feeds, m their mean over the group and y the result. Per parameter, in float64, over the steps
after the warm-up:

    compressed          sum(y) = sum(m) once zeros have been fed long enough: what was held back has come out
    compressed(ef21)    y = m once the same has been fed long enough
    compressed(False)   ||y - m|| <= sqrt(1 - delta) mean_r ||x_r||, per bucket and step
    unbiased            the same is fed N = 128 times; for any direction u, with d_t = <y_t - m, u>,
                        |sum_t d_t| <= 6 sqrt(sum_t d_t**2)
    local               y = sum_q w_q x_q with w >= 0, the same w for every element of a step, each rank's own w above zero;
                        w sums to 1 on each rank, and over the ranks of a group to 1 for each q

Long enough. A compressor with ``delta`` keeps at most (1 - delta)**(1/2) of what it is given. After n steps of zeros at
most (1 - delta)**(n/2) of the residual is left; n makes that 1/256. A residual is seldom above a few gradients, so that
what is left is below 1/64 of what was fed: the limit is 1/16, and a divisor, a group or a residual that is wrong is off by
a quarter or more.

Unbiased. sum_t d_t / sqrt(sum_t d_t**2) is self-normalized: for errors that are symmetric given the past, it exceeds 6
with probability at most 2 exp(-6**2 / 2) < 4e-8 (Efron, JASA 1969); with 6 directions for each of at most 5 parameters,
below 1.2e-6 a run, before any run is seen; a hook draws the same in every run (rule 3.3), so that a verdict does not vary.
A bias as large as 0.53 of the errors' deviation in one of the directions is found, and one without any deviation.

Local. Crafted gradients of all parameters are far more than ranks, and independent: the weights are what least squares
finds, and are exact up to rounding.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from conformance.claims import CONTRACTION, DIFFERENCE, FEEDBACK, LOCAL, UNBIASED, Claims
from conformance.oracle import mean
from conformance.run import Run
from conformance.scenario import Scenario
from conformance.verdict import Found

LEFT, LIMIT = 1 / 256, 1 / 16
TRIALS, SIGMAS = 128, 6.0
ROUNDINGS = 16  # units in the last place, of any dtype, that no claim speaks of

# The scenarios on which lossy results are judged over many steps; the others are as short as they are.
_LONG = ("values", "buckets", "long", "dtypes", "shapes", "subgroups", "complex", "sparse")
# Those of many buckets, which take long: at one world size, an odd one, where exact results are cheap to judge at several.
_ONE_WORLD = ("dtypes", "shapes")

# Matrices that a low rank compresses: (n + m) rank 2 < n m up to rank 6.
_WIDER = {(5, 3): (24, 32), (3, 5): (24, 32), (6, 5): (32, 24), (4, 3, 2, 5): (24, 3, 2, 5), (20_011,): (89, 225)}


def under(scenario: Scenario, claims: Claims) -> Scenario:
    """Return the scenario as it is run for a subject with these claims: longer, with
    matrices that are worth compressing, and without what the claims make meaningless."""
    if claims.dtypes and scenario.name != "dtypes":
        params = tuple(spec for spec in scenario.params if spec.dtype in claims.dtypes)
        scenario = replace(scenario, params=params or scenario.params)
    if claims.fused and scenario.params:
        scenario = replace(scenario, fused=True, steps=tuple(kind for kind in scenario.steps if kind != "wide"))
    if not claims.lossy or not scenario.params:
        return scenario
    special = "nan" in scenario.steps
    steps = tuple(kind for kind in scenario.steps if kind != "wide")
    longer = scenario.name in _LONG
    if claims.lossy == UNBIASED and not special:
        steps = ("constant",) * (TRIALS if longer else len(steps))
    elif claims.lossy == FEEDBACK and longer:
        steps += ("zero_all",) * _steps_until(claims.delta)
    elif claims.lossy == DIFFERENCE and longer:
        steps += ("constant",) * _steps_until(claims.delta)
    return replace(
        scenario,
        world_sizes=(3,) if scenario.name in _ONE_WORLD and longer else scenario.world_sizes,
        params=tuple(replace(spec, shape=_WIDER.get(spec.shape, spec.shape)) for spec in scenario.params),
        steps=("crafted",) * claims.warmup + steps,
        fault_step=scenario.fault_step + claims.warmup,
    )


def _steps_until(delta: float) -> int:
    return math.ceil(2 * math.log(LEFT) / math.log(1 - delta)) if delta < 1 else 2


def require(run: Run, claims: Claims, found: Found) -> None:
    """Require what the claim says of all steps after the warm-up; report the first rank and parameter of which it is not so."""
    judge, steps = _Judge(run, claims, found), range(claims.warmup, len(run.scenario.steps))
    if claims.lossy == LOCAL:
        judge.weights(steps)
    elif claims.lossy == CONTRACTION:
        judge.contraction(steps)
    elif run.scenario.name not in _LONG:
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
        cause = "state keeps a NaN or an infinity of an earlier step" if bad and step else ""
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


def differs(run: Run, step: int, claims: Claims) -> bool:
    """Whether any rank's result of ``step`` is further from the mean than rounding explains."""
    judge = _Judge(run, claims, Found())
    for rank, index in product(range(run.world), range(len(run.scenario.params))):
        got, right = run.got(rank, step, index), judge.mean(rank, step, index)
        if got is None or (got - right).norm() > ROUNDINGS * _unit(run, index) * judge.fed_norm(rank, [step], [index]):
            return True
    return False


@dataclass
class _Judge:
    """One run under one claim; each method requires something of it."""

    run: Run
    claims: Claims
    found: Found

    def group(self, rank: int) -> tuple[int, ...]:
        return tuple(range(self.run.world)) if self.claims.world_only else self.run.group(rank)

    def mean(self, rank: int, step: int, index: int) -> torch.Tensor:
        return mean(self.run, rank, step, index, self.group(rank))

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
                cause = _cause(total, means, own, len(self.group(rank)))
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
                members = [indices[name] for name in call["parameters"] if name in indices]
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
        for rank, index, where in self.each():
            got = self.got(rank, index, steps)
            if got is None:
                return
            right = torch.stack([self.mean(rank, step, index) for step in steps])
            slack = ROUNDINGS * _unit(self.run, index) * self.fed_norm(rank, [steps[0]], [index])
            for number, u in enumerate(_directions(right[0])):
                errors = (got - right) @ u
                total, spread = abs(float(errors.sum())), math.sqrt(float(errors.square().sum()))
                bound = SIGMAS * spread + len(steps) * slack
                cause = ""
                if total > bound:
                    own = self.run.fed(rank, steps[0], index) * len(steps)
                    cause = _cause(got.sum(0), right.sum(0), own, len(self.group(rank)))
                if not self.found.require(
                    total <= bound,
                    f"errors of {len(steps)} draws that cancel out: at most {SIGMAS:g} times their root sum of squares",
                    f"{where}: {total / max(spread, slack):.3g} times, in direction {number}; on average the result is off by "
                    f"{total / len(steps) / max(float(right[0].norm()), slack):.3g} of the mean",
                    cause,
                ):
                    return
                self.found.checked(len(steps), total / bound if bound else None)

    def weights(self, steps: range) -> None:
        for step in steps:
            kind = self.run.scenario.steps[step]
            if kind in ("zero_all", "nan", "inf", "minus_zero") or kind.startswith("tiny"):
                continue
            everyones = [self.weights_of(rank, step) for rank in range(self.run.world)]
            if any(weights is None for weights in everyones):
                return
            table = torch.stack([weights for weights in everyones if weights is not None])
            counted = table.sum(0)
            even = bool(((counted - 1).abs() <= 1e-3).all())
            said = ", ".join(f"{float(count):.3g}" for count in counted)
            if not self.found.require(even, "every rank's gradient counts once over all ranks", f"step {step}: they count {said} times"):
                return

    def weights_of(self, rank: int, step: int) -> torch.Tensor | None:
        """Return the weights ``[W]`` of ranks in the result of ``rank``; None, with a failure, where it is no weighted mean."""
        indices = [i for i, spec in enumerate(self.run.scenario.params) if math.prod(spec.shape)]
        results = [self.run.got(rank, step, i) for i in indices]
        where = f"rank {rank}, step {step}"
        if not self.found.require(all(got is not None for got in results), "a gradient", f"{where}: a parameter has none"):
            return None
        got = torch.cat([result for result in results if result is not None])
        # Elements of a narrow dtype say less about the weights than those of a wide one.
        units = torch.cat([torch.full((self.run.fed(rank, step, i).numel(),), _unit(self.run, i), dtype=torch.float64) for i in indices])
        group = self.group(rank)
        fed = torch.stack([torch.cat([self.run.fed(r, step, i) for i in indices]) for r in group], dim=1)
        scale = 1 / (units * fed.abs().amax(1).clamp(min=1e-30)).unsqueeze(1)
        solved = torch.linalg.lstsq(fed * scale, (got.unsqueeze(1) * scale)).solution.squeeze(1)
        wrong = (got - fed @ solved).abs() > ROUNDINGS * units * fed.abs().sum(1)
        said = ", ".join(f"{float(w):.3g} of rank {r}" for r, w in zip(group, solved, strict=True))
        if not self.found.require(
            not wrong.any(),
            "one weighted mean of ranks' gradients for all elements of a step",
            f"{where}: {int(wrong.sum())} of {len(got)} elements are none; nearest is {said}",
        ):
            return None
        own = solved[group.index(rank)]
        right = bool((solved >= -1e-3).all() and abs(solved.sum() - 1) <= 1e-3 and own > 1e-3)
        if not self.found.require(right, "weights of at least 0 that sum to 1, this rank's own among them", f"{where}: {said}"):
            return None
        self.found.checked(len(got))
        weights = torch.zeros(self.run.world, dtype=torch.float64)
        weights[list(group)] = solved
        return weights

    def size(self, steps: range) -> None:
        """What can be said of a few steps: results are there, finite, and no larger than compression explains."""
        for rank, index, where in self.each():
            got = self.got(rank, index, steps)
            if got is None:
                return
            size, fed = float(got.sum(0).norm()), self.fed_norm(rank, steps, [index]) * math.sqrt(len(steps))
            numel = got.size(1)
            bound = max(2.0, math.sqrt(numel)) * fed
            if not self.found.require(size <= bound, f"results of a norm of at most {bound:.3g}", f"{where}: {size:.3g}"):
                return
            self.found.checked(numel)

    def each(self) -> Iterator[tuple[int, int, str]]:
        for rank, index in product(range(self.run.world), range(len(self.run.scenario.params))):
            if math.prod(self.run.scenario.params[index].shape):
                yield rank, index, f"rank {rank}, parameter {self.run.parameter_name(index)}"

    def got(self, rank: int, index: int, steps: range) -> torch.Tensor | None:
        """Return the results ``[steps, numel]``, or None, with a failure, where one is missing or not finite."""
        results = [self.run.got(rank, step, index) for step in steps]
        for step, got in zip(steps, results, strict=True):
            where = f"rank {rank}, step {step}, parameter {self.run.parameter_name(index)}"
            if not self.found.require(got is not None, "a gradient", f"{where}: none"):
                return None
            if not self.found.require(bool(got.isfinite().all()), "finite values for finite gradients", f"{where}: some are not"):  # type: ignore[union-attr]
                return None
        return torch.stack([got for got in results if got is not None])

    def fed_norm(self, rank: int, steps: "list[int] | range", indices: list[int]) -> float:
        """The root of the sum over steps of the square of mean_r ||x_r||, over some parameters."""
        group = self.group(rank)
        total = 0.0
        for step in steps:
            norms = [math.sqrt(sum(float(self.run.fed(r, step, i).square().sum()) for i in indices)) for r in group]
            total += (sum(norms) / len(norms)) ** 2
        return math.sqrt(total)


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


def _cause(total: torch.Tensor, means: torch.Tensor, own: torch.Tensor, size: int) -> str:
    """The known mistake behind a sum of results, or ''."""
    square = float(means.square().sum())
    ratio = float(total @ means) / square if square else float("nan")
    near = float((total - ratio * means).norm()) <= LIMIT * float(means.norm())
    if size > 1 and float((total - own).norm()) <= LIMIT * float(own.norm()):
        return "equal to this rank's own gradients: nothing was communicated"
    if size > 1 and near and abs(ratio - size) <= LIMIT * size:
        return "world_size times the mean: the sum was not divided"
    if size > 1 and near and abs(ratio - 1 / size) <= LIMIT:
        return "the mean divided by world_size: it was divided twice"
    if near:
        return f"{ratio:.3g} times the mean"
    if 0 < ratio < 1:
        return f"only {ratio:.2g} of the mean comes out: what is left out of a step is lost, or not added to the next"
    return f"{ratio:.2g} times the mean, and not in its direction" if math.isfinite(ratio) else ""
