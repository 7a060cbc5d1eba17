"""Compute the right result in float64, and the largest error of a right hook.

Exact inputs. For the crafted kinds (``scenarios/gradients.py``) every intermediate value of every
right algorithm is representable, so the bound is 0.

Other inputs. Let x_1 .. x_W be the values of one element on the W ranks of the group, u the unit
roundoff of the coarsest dtype on the way (the bucket's dtype, or the dtype that the subject claims
to round to) and eta its smallest subnormal. A right hook computes the mean with at most k rounded
operations on the path of each x_r:

    exact      W - 1 additions in some order, and at most 2 for the division (a quotient, or a
               rounded reciprocal and a product)                                         k = W + 1
    rounded    the same and the rounding of the input                                    k = W + 2
    scaled     W - 1 additions, and a factor before the sum and another after it, each rounded and
               multiplied; one more if it is rounded, too                               k = W + 3

By the standard error analysis of sums (Higham, Accuracy and Stability of Numerical Algorithms,
section 4.2), whatever the order,

    |computed - mean| <= gamma_k * sum_r |x_r| / W + k * eta,      gamma_k = k u / (1 - k u)

where k * eta covers operations that underflow (each errs by at most eta / 2; a W-fold division of a
sum only shrinks the earlier errors). For the claim ``sum`` both sides are W times as large.

Backends. A ring or a tree adds in another order than the order of ranks, and rounds to the bucket's
dtype at each hop, also in half precision. A rank's value passes at most W - 1 of these additions,
however they are arranged. NCCL's AVG multiplies the value by 1 / W, both rounded to that dtype,
before it adds: these are the 2 operations of the division, done first. If a switch or a kernel adds
in a wider dtype and rounds once, less is lost. So NCCL needs no wider bound, not even in half
precision. Crafted values are exact there, too: they are exact for every order, and for a product
with a rounded 1 / W.

Scaled. The factors are at most 1, and no floats: 1 / sqrt(W) before the sum and after it. Crafted
values are then right within the same bound, zeros give zeros, and values that are not finite are
right to the bit.

Subnormals. Multiples of W eta are fed, with the smallest subnormal eta of the dtype on the way. A
hook that divides before the sum by W, or by a power of two that divides W, is exact, and so is one
that divides after it. If a hook divides by a power of two f < W first, and by W / f afterwards,
each of the W values errs by at most eta / 2 before the sum, which is exact; that error is divided
by W / f, and the last quotient errs by eta / 2 again:

    |computed - mean| <= W (eta / 2) / (W / f) + eta / 2 = (f + 1) / 2 eta

For W = 2**n every f divides W, and the bound is 0. For other W, f is at most the largest power of
two below W. The same holds for crafted values of which some x_r / f is no multiple of eta. Under
``scaled`` the factor after the sum may be 1: the bound is (W + 1) / 2 eta.

Overflow. If the partial sums of one sign can exceed the largest value of the dtype, an infinity of
that sign is right, and NaN if those of both signs can. A finite value is right only within the
bound: a value that was clamped to the largest one is not.
"""

import functools
import math
from dataclasses import dataclass

import torch

from conformance.records.run import Run, fed
from conformance.scenarios.model import Param
from conformance.scenarios.resting_parameter import RESTING
from conformance.scenarios.specials import base_kind
from conformance.subjects.claims import Claims

# The kinds of gradients with a bound of 0.
EXACT_KINDS = (
    "crafted",
    RESTING,
    "tiled",
    "nan",
    "inf",
    "zero_one",
    "zero_all",
    "tiny",
    "tiny_float16",
    "tiny_bfloat16",
)


# The sizes of groups for which these kinds are exact. If 1 / W has the relative error e, the
# product W k (1 / W) is k (1 + e). It rounds to k if |e| is at most a quarter of the distance of 1
# and the next larger number: below a power of two, numbers are twice as dense. That holds in every
# dtype for the sizes up to 6 and for 8, and not for 7 in float32: a hook that multiplies by 1 / 7
# is right within the bound of a sum.
EXACT_SIZES = (1, 2, 3, 4, 5, 6, 8)


# Right values of larger parameters are computed for each rank, since thousands of them are kept.
MOST_KEPT = 1 << 18


@dataclass
class Mismatch:
    """The first wrong element of a step, and the number of wrong elements.

    Attributes:
        rank, step, parameter, index: its place; ``index`` counts in C order within the parameter.
        expected, actual, bound: the values; ``bound`` is 0 if the result must be bit-exact.
        wrong, total: elements, over all ranks and parameters of the step.
        missing: the parameter has no gradient at all.
    """

    rank: int
    step: int
    parameter: int
    index: int
    expected: float
    actual: float
    bound: float
    wrong: int
    total: int
    missing: bool = False


@dataclass
class Comparison:
    """One step of one run, compared with the oracle.

    Attributes:
        checked: the number of elements.
        margin: the largest error as a fraction of its bound.
        mismatch: the first wrong element, if any.
    """

    checked: int
    margin: float
    mismatch: Mismatch | None


def mean(
    run: Run, rank: int, step: int, index: int, group: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return the mean over ``group`` (by default the group of ``rank``) in float64."""
    group = group or run.group(rank)
    return torch.stack([run.fed(r, step, index) for r in group]).sum(0) / len(group)


def expected(
    run: Run, rank: int, step: int, index: int, claims: Claims
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (right value, its bound, values of the ranks ``[W, numel]``) of one parameter."""
    found = _expectation(run, rank, step, index, claims)
    return found.right, found.bound, found.values


class Expectation:
    """What is expected of one parameter.

    Args:
        values: the values of the ranks, ``[W, numel]``.
        dtype: the dtype of the bucket.
        claims: the claims.
        kind: the kind of the values, without a place.
        more: what the bound is larger by.

    Attributes:
        right: the right value of each element.
    """

    def __init__(
        self, values: torch.Tensor, dtype: str, claims: Claims, kind: str, more: float = 0.0
    ) -> None:
        self.values = values
        self.right = values.sum(0) / len(values) * (len(values) if claims.sum else 1)
        self._inputs = dtype, claims, kind
        self._more = more

    @functools.cached_property
    def bound(self) -> torch.Tensor:
        """The bound of each element, which most results are judged without: they are equal."""
        return _bound(self.values, *self._inputs) + self._more


def _expectation(run: Run, rank: int, step: int, index: int, claims: Claims) -> Expectation:
    group = tuple(range(run.world)) if claims.world_only else run.group(rank)
    spec = run.scenario.params[index]
    recorded = run.recorded(group, step, index)
    if recorded is not None:
        flushed = _flushed(spec.dtype) * len(group)
        return Expectation(recorded, spec.dtype, claims, "recorded", flushed)
    kind = run.scenario.steps[step]
    number = step + run.scenario.first_step
    factors = tuple(run.factor(other, step, index) for other in group)
    size = len(run.group(rank))
    period = run.scenario.period
    is_kept = math.prod(spec.shape) <= MOST_KEPT
    compute = expected_of_inputs if is_kept else expected_of_inputs.__wrapped__
    return compute(kind, spec, group, factors, size, number, index, claims, period)


@functools.lru_cache(maxsize=4096)  # the ranks of a group expect the same
def expected_of_inputs(
    kind: str,
    spec: Param,
    group: tuple[int, ...],
    factors: tuple[int, ...],
    size: int,
    step: int,
    index: int,
    claims: Claims,
    period: int = 0,
) -> Expectation:
    """Return the expectation for inputs that the kit has made.

    Args:
        kind: the kind of gradients of the step.
        spec: the parameter.
        group: the ranks that the mean is taken over.
        factors: for each of them, the factor of its gradient; 0 if it has none.
        size: the number of ranks that the inputs were made for.
        step: the number of the step.
        index: the number of the parameter.
        claims: the claims.
        period: the length of the table that gradients repeat, or 0.
    """
    make = fed if math.prod(spec.shape) <= MOST_KEPT else fed.__wrapped__
    inputs = [make(kind, spec, size, rank, step, index, period) for rank in group]
    values = torch.stack([one * factor for one, factor in zip(inputs, factors, strict=True)])
    return Expectation(values, spec.dtype, claims, base_kind(kind))


def _bound(values: torch.Tensor, dtype: str, claims: Claims, kind: str) -> torch.Tensor:
    """Return the bound of the right value for the values of the ranks, ``[W, numel]``."""
    size = len(values)
    bound = torch.zeros_like(values[0])
    unit, eta, _ = precision(dtype, claims)
    if kind.startswith("tiny"):
        bound += _units_of_underflow(size, claims) * eta
    elif kind in EXACT_KINDS and size in EXACT_SIZES and not claims.scaled:
        units = values / (_largest_power_below(size) * eta)
        underflows = (units != units.round()).any(0)
        bound += torch.where(underflows, _units_of_underflow(size, claims) * eta, 0.0)
    else:
        operations = size + 1 + bool(claims.rounded) + 2 * claims.scaled
        gamma = operations * unit / (1 - operations * unit)
        bound = gamma * values.abs().sum(0) / size + operations * eta
    if kind in EXACT_KINDS and bound.any():
        is_bounded = values.isfinite().all(0) & values.any(0)
        bound = torch.where(is_bounded, bound, torch.zeros_like(bound))
    return bound * size if claims.sum else bound


def _units_of_underflow(size: int, claims: Claims) -> float:
    """Return by how many smallest subnormals a right hook may err, see "Subnormals" above."""
    if claims.sum:
        return 0.0
    if claims.scaled:
        return (size + 1) / 2
    divisor = _largest_power_below(size)
    return 0.0 if divisor * 2 == size or size == 1 else (divisor + 1) / 2


def _largest_power_below(size: int) -> int:
    """Return the largest power of two below a size; 1 for the size 1."""
    return 1 << (size - 1).bit_length() - 1 if size > 1 else 1


def judge_values(
    got: torch.Tensor, values: torch.Tensor, dtype: str, claims: Claims, *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (right value, its bound, whether ``got`` is wrong) of each element, in float64.

    Args:
        got: the results.
        values: the values of the ranks, ``[W, numel]``.
        dtype: the dtype of the bucket.
        claims: the claims.
        exact: the kind of the values has a bound of 0.
    """
    found = Expectation(values, dtype, claims, "crafted" if exact else "normal")
    largest = precision(dtype, claims)[2]
    return found.right, found.bound, ~is_right(got, found.right, found.bound, values, largest)


def _flushed(dtype: str) -> float:
    """Return the largest number that a training run may have flushed to zero."""
    smallest = torch.finfo(getattr(torch, dtype)).smallest_normal
    # Half precision is not flushed: its smallest normal number is no negligible gradient.
    return smallest if smallest < 1e-30 else 0.0


def precision(dtype: str, claims: Claims) -> tuple[float, float, float]:
    """Return (unit roundoff, smallest subnormal, largest value) of the coarsest dtype."""
    names = [dtype.replace("complex64", "float32").replace("complex128", "float64")]
    if claims.rounded:
        names.append(claims.rounded)
    infos = [torch.finfo(getattr(torch, name)) for name in names]
    return (
        max(info.eps / 2 for info in infos),
        max(info.smallest_normal * info.eps for info in infos),
        min(info.max for info in infos),
    )


def compare(run: Run, step: int, claims: Claims, ranks: list[int] | None = None) -> Comparison:
    """Compare every element of every parameter at ``step`` with the oracle.

    Args:
        run: the run.
        step: the step.
        claims: the claims.
        ranks: the ranks to compare; all if None.
    """
    result = Comparison(0, 0.0, None)
    wrong = 0
    for rank in range(run.world) if ranks is None else ranks:
        for index in range(len(run.scenario.params)):
            if run.receives(rank, step, index):
                wrong += _compare_parameter(run, rank, step, index, claims, result)
    if result.mismatch:
        result.mismatch.wrong = wrong
        result.mismatch.total = result.checked
    return result


def _compare_parameter(
    run: Run, rank: int, step: int, index: int, claims: Claims, result: Comparison
) -> int:
    """Compare one parameter of one rank, add it to ``result``, and return its wrong elements."""
    found = _expectation(run, rank, step, index, claims)
    right = found.right
    got = run.got(rank, step, index)
    result.checked += right.numel()
    if got is None or got.numel() != right.numel():
        if right.numel() and result.mismatch is None:
            value = right[0].item()
            result.mismatch = Mismatch(
                rank, step, index, 0, value, float("nan"), 0.0, 0, 0, missing=True
            )
        return right.numel()
    if torch.equal(got, right):
        return 0
    largest = precision(run.scenario.params[index].dtype, claims)[2]
    bound = found.bound
    bad = ~is_right(got, right, bound, found.values, largest)
    if bad.any():
        if result.mismatch is None:
            at = int(bad.nonzero()[0])
            numbers = (right[at].item(), got[at].item(), bound[at].item())
            result.mismatch = Mismatch(rank, step, index, at, *numbers, 0, 0)
        return int(bad.sum())
    bounded = got.isfinite() & (bound > 0)
    if bounded.any():
        errors = (got - right).abs()[bounded] / bound[bounded]
        result.margin = max(result.margin, float(errors.max()))
    return 0


def is_right(
    got: torch.Tensor,
    right: torch.Tensor,
    bound: torch.Tensor,
    values: torch.Tensor,
    largest: float,
) -> torch.Tensor:
    """Return for each element whether it is right, see "Overflow" above."""
    same = (got == right) | (got.isnan() & right.isnan())
    if not (bound > 0).any():
        return same
    near = (got - right).abs() <= bound
    above = values.clamp(min=0).sum(0) * 1.01 >= largest  # 1.01 is far above 1 + gamma_k for any k
    below = -values.clamp(max=0).sum(0) * 1.01 >= largest
    overflow = ((got == torch.inf) & above) | ((got == -torch.inf) & below)
    return same | near | overflow | (got.isnan() & above & below)
