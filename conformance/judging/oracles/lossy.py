"""Judge lossy results, which are compressed, random or local: no single step is right or wrong.

Let x_r be the gradient that rank r feeds, m the mean over the group and y the result. The following
must hold for each parameter, in float64, over the steps after the warm-up:

    compressed          sum(y) = sum(m) once zeros have been fed long enough: the residual is empty
    compressed(ef21)    y = m once the same gradient has been fed long enough
    compressed(False)   ||y - m|| <= sqrt(1 - delta) mean_r ||x_r||, per bucket and step
    unbiased            the same gradient is fed N = 96 times; for six directions u, with
                        d_t = <y_t - m, u>,
                        |sum_t d_t| <= 6 sqrt(sum_t d_t**2) + 12 max_t |d_t|
    local               y = sum_q w_q x_q with w >= 0, the same w for every element of a bucket,
                        each rank's own w above zero; w sums to 1 on each rank, and over the ranks
                        of a group to 1 for each q

Long enough. A compressor with ``delta`` keeps at most (1 - delta)**(1/2) of its input. After n
steps of zeros at most (1 - delta)**(n/2) of the residual is left; n makes that 1/1024. A residual
is seldom larger than a few gradients. The rest is therefore below 1/256 of the gradients, or a few
times that if the rest becomes uneven and signs keep less of it than they claim. The limit is 1/16.
A wrong divisor, group or residual is off by a quarter or more.

Unbiased. sum_t d_t / sqrt(sum_t d_t**2) is self-normalized: for errors that are symmetric given the
past it exceeds 6 with probability at most 2 exp(-6**2 / 2) < 4e-8 (Efron, JASA 1969). Errors that
are seldom and large are not symmetric: if L of them are expected and K of size R come, then
|K - L| R is to be at most 6 sqrt(K) R + 12 R. For L from 18 on this fails with probability below
1e-7 (Poisson). Directions are therefore taken over many random elements: over all parameters
together, and over each parameter of at least 256 elements. Smaller parameters are judged only if
the results are near the mean in each draw (a relative error of at most 1/4); a bias of up to a
twentieth of a typical element is then left to the larger ones. With at most 60 directions in a run
the probability of a false failure is below 1e-5 before any run is seen. A hook draws the same
numbers in every run (rule 3.3), so that a verdict does not vary. A bias of twice the errors'
deviation along a direction is found, and so is a bias without any deviation.

A parameter, however small, that has the same values in all draws, not all zero, must be the mean up
to a quarter, if elements change from draw to draw in at least 2 * 1/5 * 4/5 of all cases. That is
the rate of elements one of whose two values has a probability of 1/5. A value that would compensate
for the constant ones, if it is drawn as often, stays out of 96 draws with a probability below
(4/5)**96 < 1e-9. If draws change less often this is not required: a correction may be seldom.

Small gradients. All bounds are relative to the gradients, so that they hold for gradients a
thousandth as large, too. Most gradients of a model are below 1; a threshold or an epsilon that is
an absolute number shows only there (13.10).

Local. A bucket has far more elements than there are ranks, and they are independent: the weights
are the solution of least squares, and exact up to rounding. A bucket of fewer than 4 elements a
rank proves only that each element lies between the smallest and the largest gradient.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.gradients import REPEATED
from conformance.subjects.claims import (
    CONTRACTION,
    DIFFERENCE,
    FEEDBACK,
    LOCAL,
    UNBIASED,
    Claims,
)

LEFT = 1 / 1024  # of a residual, once zeros have been fed long enough
LIMIT = 1 / 16
TRIALS = 96  # draws on the same gradients

# See "Unbiased".
SIGMAS = 6.0
PEAKS = 12.0
MANY = 256  # elements that a parameter must have for directions of its own
FINE = 1 / 4  # the relative error of a draw that is near the mean
SMALL = 1 / 20  # of a typical element: the bias that is not found in small parameters
OFTEN = 2 * 1 / 5 * 4 / 5  # the share of elements that change from draw to draw

ROUNDINGS = 16  # units in the last place of any dtype that every claim is allowed
WEIGHT_SLACK = 1e-3  # of a weight of a local result, which is exact up to rounding

# The scenarios in which lossy results are judged over many steps; the others stay short.
LONG_SCENARIOS = (
    "values",
    "small",
    "buckets",
    "dtypes",
    "shapes",
    "subgroups",
    "complex",
    "sparse",
    "saved",
    "resumed",
)

# Scenarios of many buckets, which take long: lossy subjects run them at one world size, while exact
# results are cheap to judge at several.
ONE_WORLD_SCENARIOS = ("dtypes", "shapes")

# Kinds of gradients from which the weights of a local result cannot be solved.
_WITHOUT_WEIGHTS = ("zero_all", "nan", "inf", "minus_zero")


def require(run: Run, claims: Claims, found: Found) -> None:
    """Require the claim of all steps after the warm-up; report the first violation."""
    judge = _Judge(run, claims, found)
    steps = range(claims.warmup, len(run.scenario.steps))
    if claims.lossy == LOCAL:
        judge.require_weights(steps)
    elif claims.lossy == CONTRACTION:
        judge.require_contraction(steps)
    elif run.scenario.name not in LONG_SCENARIOS:
        judge.require_size(steps)
    elif claims.lossy == FEEDBACK:
        judge.require_sum_of_means(steps)
    elif claims.lossy == DIFFERENCE:
        judge.require_convergence(steps[-1])
    elif claims.lossy == UNBIASED:
        judge.require_expectation(steps)


def require_finite(run: Run, found: Found, steps: list[int]) -> None:
    """Require finite results of ``steps``; report the first violation."""
    for step, rank, index in product(steps, range(run.world), range(len(run.scenario.params))):
        bad = _not_finite(run.got(rank, step, index))
        place = f"rank {rank}, step {step}, parameter {run.parameter_name(index)}"
        cause = ""
        if bad and step:
            cause = (
                "a division by zero, or state that keeps a NaN or an infinity of an earlier step"
            )
        expected = "finite values for finite gradients"
        if not found.require(not bad, expected, f"{place}: {bad}", cause):
            return


def _not_finite(got: torch.Tensor | None) -> str:
    """Return the flaw of a result that is to be finite, or an empty text."""
    if got is None:
        return "no gradient"
    count = int((~got.isfinite()).sum())
    return f"{count} elements are not" if count else ""


def require_seen(run: Run, claims: Claims, found: Found, steps: list[int]) -> None:
    """Require non-finite gradients in ``steps`` to show on every rank.

    A rank of a ``local`` subject may miss those of others, but not its own.
    """
    indices = range(len(run.scenario.params))
    for step, rank in product(steps, range(run.world)):
        own = (run.fed(rank, step, index) for index in indices)
        if claims.lossy == LOCAL and all(fed.isfinite().all() for fed in own):
            continue
        results = [run.got(rank, step, index) for index in indices]
        seen = any(got is not None and not got.isfinite().all() for got in results)
        found.require(
            seen,
            "a result that is not finite if a gradient is not",
            f"rank {rank}, step {step}: all are finite",
        )


def whole_result(run: Run, rank: int, step: int) -> torch.Tensor | None:
    """Return the results of all parameters in one vector, or None if one is missing."""
    return _joined([run.got(rank, step, index) for index in range(len(run.scenario.params))])


def _joined(results: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [got for got in results if got is not None]
    return torch.cat(present) if len(present) == len(results) else None


def differs(run: Run, step: int, claims: Claims) -> bool:
    """Return whether a result of ``step`` is further from the mean than rounding explains."""
    judge = _Judge(run, claims, Found())
    for rank, index in product(range(run.world), range(len(run.scenario.params))):
        # State may keep roundings of earlier steps, relative to the gradients of those steps.
        fed = max(judge.fed_norm(rank, [earlier], [index]) for earlier in range(step + 1))
        got = run.got(rank, step, index)
        right = judge.mean(rank, step, index)
        if got is None or (got - right).norm() > ROUNDINGS * _unit(run, index) * fed:
            return True
    return False


@dataclass
class _Judge:
    """One run under one claim; the ``require_...`` methods hold it to the table above."""

    run: Run
    claims: Claims
    found: Found
    means: dict[tuple[tuple[int, ...], int, int], torch.Tensor] = field(default_factory=dict)

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose mean is right for ``rank``."""
        return tuple(range(self.run.world)) if self.claims.world_only else self.run.group(rank)

    def mean(self, rank: int, step: int, index: int) -> torch.Tensor:
        """Return the mean; it is computed once for steps that feed the same gradients."""
        scenario = self.run.scenario
        group = self.group(rank)
        kind = scenario.steps[step]
        # A sparse parameter gets the gradients of other rows at every step.
        if kind in REPEATED and scenario.params[index].layout != "sparse":
            step = scenario.steps.index(kind)
        if (group, step, index) not in self.means:
            self.means[group, step, index] = mean(self.run, rank, step, index, group)
        return self.means[group, step, index]

    def require_sum_of_means(self, steps: range) -> None:
        """Require the results of all steps to sum to the means, for compression with feedback."""
        fed = [step for step in steps if self.run.scenario.steps[step] != "zero_all"]
        zeros = len(steps) - len(fed)
        for rank, index, place in self.parameters():
            got = self.results(rank, index, steps)
            if got is None:
                return
            total = got.sum(0)
            means = torch.stack([self.mean(rank, step, index) for step in fed]).sum(0)
            off = float((total - means).norm()) / self.fed_norm(rank, fed, [index])
            cause = ""
            if off > LIMIT:
                own = torch.stack([self.run.fed(rank, step, index) for step in fed]).sum(0)
                cause = _cause(total, means, own, len(self.group(rank)), feedback=True)
            holds = self.found.require(
                off <= LIMIT,
                f"results of {len(fed)} steps, and of {zeros} steps of zeros after them, "
                f"that sum to the means, within {LIMIT:g}",
                f"{place}: their sum is off by {off:.3g} of the gradients",
                cause,
            )
            if not holds:
                return
            self.found.checked(total.numel(), off / LIMIT)

    def require_convergence(self, last: int) -> None:
        """Require the mean in the last step, after the same gradients again and again."""
        for rank, index, place in self.parameters():
            got = self.results(rank, index, range(last, last + 1))
            if got is None:
                return
            right = self.mean(rank, last, index)
            off = float((got[0] - right).norm()) / self.fed_norm(rank, [last], [index])
            cause = ""
            if off > LIMIT:
                own = self.run.fed(rank, last, index)
                cause = _cause(got[0], right, own, len(self.group(rank)))
            holds = self.found.require(
                off <= LIMIT,
                f"the mean, within {LIMIT:g}, of gradients that were fed again and again",
                f"{place}: off by {off:.3g}",
                cause,
            )
            if not holds:
                return
            self.found.checked(right.numel(), off / LIMIT)

    def require_contraction(self, steps: range) -> None:
        """Require the bound of compression without feedback, of each bucket in each step."""
        for step, rank in product(steps, range(self.run.world)):
            for call in self.run.ranks[rank].all("call", step=step):
                members = self.receiving(rank, step, call)
                if members and not self.require_contracted(rank, step, call["index"], members):
                    return

    def require_contracted(self, rank: int, step: int, bucket: int, members: list[int]) -> bool:
        place = f"rank {rank}, step {step}, bucket {bucket}"
        total = self.bucket_result(rank, step, members, place)
        if total is None:
            return False
        right = torch.cat([self.mean(rank, step, i) for i in members])
        off = float((total - right).norm())
        share = math.sqrt(1 - self.claims.delta)
        rounding = ROUNDINGS * max(_unit(self.run, i) for i in members)
        bound = (share + rounding) * self.fed_norm(rank, [step], members)
        holds = off <= bound
        cause = ""
        if not holds:
            own = torch.cat([self.run.fed(rank, step, i) for i in members])
            cause = _cause(total, right, own, len(self.group(rank)))
        limit = f"sqrt(1 - {self.claims.delta:g}) ||gradient|| = {bound:.3g}"
        self.found.require(holds, f"||result - mean|| <= {limit}", f"{place}: {off:.3g}", cause)
        if holds:
            self.found.checked(total.numel(), off / bound if bound else None)
        return holds

    def require_expectation(self, steps: range) -> None:
        """Require the errors of random results to cancel out, see "Unbiased" above."""
        for rank in range(self.run.world):
            errors = {}
            means = {}
            for _, index, _ in self.parameters(rank):
                got = self.results(rank, index, steps)
                if got is None:
                    return
                means[index] = torch.stack([self.mean(rank, step, index) for step in steps])
                errors[index] = got - means[index]
            if not self.require_unbiased(rank, errors, means):
                return

    def require_unbiased(
        self, rank: int, errors: dict[int, torch.Tensor], means: dict[int, torch.Tensor]
    ) -> bool:
        """Judge one rank's draws: errors and means ``[draws, numel]`` by parameter."""
        whole = torch.cat(list(errors.values()), dim=1)
        right = torch.cat(list(means.values()), dim=1)
        is_fine = float(whole.norm()) <= FINE * float(right.norm())
        typical = float(right.norm()) / math.sqrt(right.numel())
        varies_often = float((whole[1:] != whole[:-1]).double().mean()) >= OFTEN
        slack = ROUNDINGS * max(_unit(self.run, index) for index in errors) * typical
        if not self.require_cancelling(whole, right[0], f"rank {rank}, all parameters", slack):
            return False
        for index in errors:
            place = f"rank {rank}, parameter {self.run.parameter_name(index)}"
            if varies_often and not self.require_constant_is_mean(
                errors[index], means[index], place
            ):
                return False
            numel = errors[index].size(1)
            if not is_fine and numel < MANY:
                continue
            slack = ROUNDINGS * _unit(self.run, index) * typical
            if numel < MANY:
                slack += SMALL * typical
            if not self.require_cancelling(errors[index], means[index][0], place, slack):
                return False
        return True

    def require_constant_is_mean(
        self, errors: torch.Tensor, means: torch.Tensor, place: str
    ) -> bool:
        """Require a parameter with the same values in all draws, not all zero, to be the mean."""
        got = errors + means
        same_inputs = bool((means == means[0]).all())
        same_results = bool((got == got[0]).all())
        if not same_inputs or not same_results or not got[0].any():
            return True
        off = float(errors[0].norm()) / float(means[0].norm())
        return self.found.require(
            off <= FINE,
            "the mean, if results do not vary",
            f"{place}: the same {off:.3g} off in each of {len(got)} draws",
        )

    def require_cancelling(
        self, errors: torch.Tensor, right: torch.Tensor, place: str, slack: float
    ) -> bool:
        """Require errors ``[draws, n]`` to cancel out, up to ``slack`` for each element."""
        draws = len(errors)
        for u in _directions(right):
            along = errors @ u
            total = abs(float(along.sum()))
            peak = float(along.abs().max())
            spread = math.sqrt(float(along.square().sum()))
            bound = SIGMAS * spread + PEAKS * peak + draws * slack * math.sqrt(len(u))
            off = total / draws / max(float(right.norm()), 1e-300)
            cause = ""
            if total > bound:
                cause = _cause((errors + right).sum(0), right * draws, torch.zeros_like(right), 1)
            holds = self.found.require(
                total <= bound,
                f"errors of {draws} draws that cancel out: a sum of at most {bound:.3g}",
                f"{place}: {total:.3g}; on average the result is off by {off:.3g} of the mean",
                cause,
            )
            if not holds:
                return False
            self.found.checked(draws, total / bound if bound else None)
        return True

    def require_weights(self, steps: range) -> None:
        """Require weighted means whose weights sum to 1 on each rank, and for each rank."""
        for step in steps:
            kind = self.run.scenario.steps[step]
            if kind in _WITHOUT_WEIGHTS or kind.startswith("tiny"):
                continue
            ranks = range(self.run.world)
            inputs = {rank: self.run.scenario.inputs_of(rank, self.run.world) for rank in ranks}
            training = [rank for rank in ranks if step < inputs[rank]]
            tables: dict[int, list[torch.Tensor]] = {}
            for rank in training:
                for call in self.run.ranks[rank].all("call", step=step):
                    weights = self.weights_of(rank, step, call)
                    if weights is None:
                        return
                    tables.setdefault(call["index"], []).append(weights)
            for bucket, rows in tables.items():
                place = f"step {step}, bucket {bucket}"
                all_seen = len(training) == self.run.world
                if not self.require_equal_influence(torch.stack(rows).sum(0), place, all_seen):
                    return

    def require_equal_influence(self, counts: torch.Tensor, place: str, all_seen: bool) -> bool:
        """Require each rank's weights to sum to 1 over all ranks."""
        known = all_seen and not counts.isnan().any()
        even = not known or bool(((counts - 1).abs() <= WEIGHT_SLACK).all())
        times = ", ".join(f"{float(count):.3g}" for count in counts)
        return self.found.require(
            even,
            "every rank's gradient counts once over all ranks",
            f"{place}: they count {times} times",
        )

    def weights_of(self, rank: int, step: int, call: dict[str, Any]) -> torch.Tensor | None:
        """Return the weights ``[W]`` of ranks in a bucket of ``rank``.

        They are NaN if the bucket is too small to solve for them. If the result is no weighted
        mean, record the failure and return None.
        """
        weights = torch.full((self.run.world,), math.nan, dtype=torch.float64)
        numels = [math.prod(spec.shape) for spec in self.run.scenario.params]
        indices = [index for index in self.receiving(rank, step, call) if numels[index]]
        if not indices:
            return weights
        group = self.group(rank)
        place = f"rank {rank}, step {step}, bucket {call['index']}"
        got = self.bucket_result(rank, step, indices, place)
        if got is None:
            return None
        fed = torch.stack(
            [torch.cat([self.run.fed(r, step, i) for i in indices]) for r in group], dim=1
        )
        slack = ROUNDINGS * max(_unit(self.run, i) for i in indices) * fed.abs().sum(1)
        outside = (got > fed.amax(1) + slack) | (got < fed.amin(1) - slack)
        if not self.found.require(
            not outside.any(),
            "between the smallest and the largest gradient of the ranks",
            f"{place}: {int(outside.sum())} of {len(got)} elements lie outside",
        ):
            return None
        # Too few elements do not determine the weights, and zeros hide the weight of a rank.
        hidden = not all(self.run.feeds(r, step, i) for r in group for i in indices)
        if len(got) < 4 * len(group) or hidden:
            return weights
        solved = _solve(fed, got)
        if not self.require_solution(fed, got, solved, slack, group, rank, place):
            return None
        self.found.checked(len(got))
        weights.zero_()
        weights[list(group)] = solved
        return weights

    def require_solution(
        self,
        fed: torch.Tensor,
        got: torch.Tensor,
        solved: torch.Tensor,
        slack: torch.Tensor,
        group: tuple[int, ...],
        rank: int,
        place: str,
    ) -> bool:
        """Require the solved weights to explain every element, and to be those of a mean."""
        wrong = (got - fed @ solved).abs() > slack
        pairs = zip(group, solved, strict=True)
        nearest = ", ".join(f"{float(weight):.3g} of rank {r}" for r, weight in pairs)
        if not self.found.require(
            not wrong.any(),
            "one weighted mean of ranks' gradients for all elements of a bucket",
            f"{place}: {int(wrong.sum())} of {len(got)} elements are none; nearest is {nearest}",
        ):
            return False
        is_nonnegative = bool((solved >= -WEIGHT_SLACK).all())
        is_mean = bool(abs(solved.sum() - 1) <= WEIGHT_SLACK)
        has_own = bool(solved[group.index(rank)] > WEIGHT_SLACK)
        return self.found.require(
            is_nonnegative and is_mean and has_own,
            "weights of at least 0 that sum to 1, this rank's own among them",
            f"{place}: {nearest}",
        )

    def require_size(self, steps: range) -> None:
        """Require results that are finite and no larger than compression explains.

        A few steps prove no more. An element may get the norm of its whole bucket if that is the
        scale.
        """
        for rank, index, place in self.parameters():
            got = self.results(rank, index, steps)
            if got is None:
                return
            norms = (
                self.fed_norm(rank, [step], self.bucket_members(rank, step, index))
                for step in steps
            )
            size = float(got.sum(0).norm())
            numel = got.size(1)
            bound = max(2.0, math.sqrt(numel)) * sum(norms)
            expected = f"results of a norm of at most {bound:.3g}"
            if not self.found.require(size <= bound, expected, f"{place}: {size:.3g}"):
                return
            self.found.checked(numel)

    def receiving(self, rank: int, step: int, call: dict[str, Any]) -> list[int]:
        """Return the parameters of a call's bucket that get a gradient, in the bucket's order."""
        indices = {self.run.parameter_name(i): i for i in range(len(self.run.scenario.params))}
        members = [indices[name] for name in call["parameters"] if name in indices]
        return [index for index in members if self.run.receives(rank, step, index)]

    def bucket_members(self, rank: int, step: int, index: int) -> list[int]:
        """Return the parameters of the bucket that held a parameter."""
        name = self.run.parameter_name(index)
        buckets = (set(call["parameters"]) for call in self.run.ranks[rank].all("call", step=step))
        names = next((names for names in buckets if name in names), {name})
        indices = range(len(self.run.scenario.params))
        return [other for other in indices if self.run.parameter_name(other) in names]

    def parameters(self, *ranks: int) -> Iterator[tuple[int, int, str]]:
        """Yield (rank, index, place in words) of each nonempty parameter, on all ranks or some."""
        for rank in ranks or range(self.run.world):
            for index, spec in enumerate(self.run.scenario.params):
                if math.prod(spec.shape):
                    yield rank, index, f"rank {rank}, parameter {self.run.parameter_name(index)}"

    def bucket_result(
        self, rank: int, step: int, members: list[int], place: str
    ) -> torch.Tensor | None:
        """Return the results of some parameters in one vector; if one is missing, record it."""
        result = _joined([self.run.got(rank, step, index) for index in members])
        self.found.require(result is not None, "a gradient", f"{place}: a parameter has none")
        return result

    def results(self, rank: int, index: int, steps: range) -> torch.Tensor | None:
        """Return the results ``[steps, numel]`` of the steps in which a parameter gets one.

        If one is missing or not finite, record the failure and return None.
        """
        results = []
        for step in steps:
            if not self.run.receives(rank, step, index):
                continue
            got = self.run.got(rank, step, index)
            place = f"rank {rank}, step {step}, parameter {self.run.parameter_name(index)}"
            if got is None:
                self.found.require(False, "a gradient", f"{place}: none")
                return None
            self.found.checked(1)
            finite = bool(got.isfinite().all())
            expected = "finite values for finite gradients"
            if not self.found.require(finite, expected, f"{place}: some are not"):
                return None
            results.append(got)
        return torch.stack(results) if results else torch.zeros(0, 1)

    def fed_norm(self, rank: int, steps: Iterable[int], indices: list[int]) -> float:
        """Return the root of the sum over steps of (mean_r ||x_r||)**2, over some parameters."""
        group = self.group(rank)
        total = 0.0
        for step in steps:
            norms = []
            for other in group:
                parts = (self.run.fed(other, step, index).square().sum() for index in indices)
                norms.append(math.sqrt(sum(map(float, parts))))
            total += (sum(norms) / len(norms)) ** 2
        return math.sqrt(total)


def _solve(fed: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
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


def _unit(run: Run, index: int) -> float:
    """Return the unit roundoff of a parameter's dtype."""
    dtype = run.scenario.params[index].dtype
    real = dtype.replace("complex64", "float32").replace("complex128", "float64")
    return torch.finfo(getattr(torch, real)).eps / 2


def _directions(right: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield six directions of length 1: the mean, its signs, all ones, and three from a hash."""
    rows = [right, right.sign(), torch.ones_like(right)]
    numbers = torch.arange(1, right.numel() + 1)
    rows += [((numbers * odd) % 127 < 63).double() * 2 - 1 for odd in (37, 59, 83)]
    for row in rows:
        yield row / max(float(row.norm()), 1e-300)


def _cause(
    total: torch.Tensor, means: torch.Tensor, own: torch.Tensor, size: int, feedback: bool = False
) -> str:
    """Return the known mistake behind a sum of results; empty if none is known.

    Args:
        total: the sum of the results.
        means: the sum of the means.
        own: the sum of the rank's own gradients.
        size: the number of ranks in the group; 1 if no mistake of communication is to be named.
        feedback: the subject claims feedback.
    """
    square = float(means.square().sum())
    ratio = float(total @ means) / square if square else float("nan")
    is_multiple = float((total - ratio * means).norm()) <= LIMIT * float(means.norm())
    if size > 1 and float((total - own).norm()) <= LIMIT * float(own.norm()):
        cause = "equal to this rank's own gradients: nothing was communicated"
        if feedback:
            cause += ", or its residual is taken against the values that it received"
        return cause
    if size > 1 and is_multiple and abs(ratio - size) <= LIMIT * size:
        return "world_size times the mean: the sum was not divided"
    if size > 1 and is_multiple and abs(ratio - 1 / size) <= LIMIT:
        return "the mean divided by world_size: it was divided twice"
    if is_multiple:
        return f"{ratio:.3g} times the mean"
    if abs(ratio - 1) <= LIMIT or not math.isfinite(ratio):
        return ""
    if 0 < ratio < 1 and feedback:
        return (
            f"only {ratio:.2g} of the mean comes out: the rest of a step is lost, "
            "or not added to the next"
        )
    return f"along the mean {ratio:.2g} times as long as it, and not in its direction"
