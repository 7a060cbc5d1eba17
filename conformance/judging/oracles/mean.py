"""What the result must be, in float64, and how far from it a right hook can end up.

Exact inputs. For the crafted kinds (``inputs.py``) every intermediate value of every right
algorithm is representable, so the bound is 0.

Other inputs. Let x_1 .. x_W be the values of one element on the W ranks of the group, u the unit
roundoff of the coarsest dtype on the way (the bucket's, or the one that the subject claims to round
to) and eta its smallest subnormal. A right hook computes the mean with at most k rounded operations
on the path of each x_r:

    exact      W - 1 additions in some order, and at most 2 for the division (a quotient, or a
               rounded reciprocal and a product)                                         k = W + 1
    rounded    the same and the rounding of the input                                    k = W + 2

By the standard error analysis of sums (Higham, Accuracy and Stability of Numerical Algorithms,
section 4.2), whatever the order,

    |computed - mean| <= gamma_k * sum_r |x_r| / W + k * eta,      gamma_k = k u / (1 - k u)

where k * eta covers operations that underflow (each errs by at most eta / 2; a W-fold division of a
sum only shrinks what came before). For the claim ``sum`` both sides are W times as large.

Backends. A ring or a tree adds in another order than that of ranks, and rounds to the bucket's dtype at each hop, also in half
precision: what a rank gives passes at most W - 1 of these additions, however they are arranged. NCCL's AVG multiplies it by
1 / W, both rounded to that dtype, before it adds: these are the 2 for the division, come first. Where a switch or a kernel
adds in a wider dtype and rounds once, less is lost. So NCCL needs no wider bound, in half precision neither, and crafted
values are exact there too: they are for every order, and for a product with a rounded 1 / W.

Overflow. Where the partial sums of one sign can exceed the largest value of the dtype, an infinity
of that sign is right, and NaN where both can; a finite value is right only within the bound, so a
value clamped to the largest one is not.
"""

import functools
from dataclasses import dataclass

import torch

from conformance.records.run import Run, fed
from conformance.scenarios.model import Param
from conformance.subjects.claims import Claims

EXACT_KINDS = ("crafted", "nan", "inf", "zero_one", "zero_all", "tiny", "tiny_float16", "tiny_bfloat16")


@dataclass
class Mismatch:
    """The first element that is not right, and how many are not.

    Attributes:
        rank, step, parameter, index: where; ``index`` counts in C order within the parameter.
        expected, actual, bound: the values; ``bound`` is 0 where the result must be bit-exact.
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
    """One step of one run, judged against the oracle."""

    checked: int
    margin: float
    mismatch: Mismatch | None


def mean(run: Run, rank: int, step: int, index: int, group: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the mean over ``group`` (by default that of ``rank``) in float64."""
    group = group or run.group(rank)
    return torch.stack([run.fed(r, step, index) for r in group]).sum(0) / len(group)


def expected(run: Run, rank: int, step: int, index: int, claims: Claims) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (right value, its bound, values of the ranks ``[W, numel]``) of one parameter."""
    group = tuple(range(run.world)) if claims.world_only else run.group(rank)
    if (values := run.recorded(group, step, index)) is not None:
        dtype = run.scenario.params[index].dtype
        right, bound = _bounded(values, dtype, claims, exact=False)
        return right, bound + _flushed(dtype) * len(group), values
    kind, spec, number = run.scenario.steps[step], run.scenario.params[index], step + run.scenario.first_step
    feeding = tuple(run.feeds(other, step, index) for other in group)
    return _expected(kind, spec, group, feeding, len(run.group(rank)), number, index, claims)


@functools.lru_cache(maxsize=4096)  # the ranks of a group expect the same
def _expected(
    kind: str, spec: Param, group: tuple[int, ...], feeding: tuple[bool, ...], world: int, step: int, index: int, claims: Claims
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.stack([fed(kind, spec, world, rank, step, index) * feeds for rank, feeds in zip(group, feeding, strict=True)])
    return *_bounded(values, spec.dtype, claims, exact=kind in EXACT_KINDS), values


def _bounded(values: torch.Tensor, dtype: str, claims: Claims, *, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (right value, its bound) for the values of the ranks, ``[W, numel]``."""
    size = len(values)
    right = values.sum(0) / size
    bound = torch.zeros_like(right)
    if not exact:
        unit, eta, _ = precision(dtype, claims)
        operations = size + (2 if claims.rounded else 1)
        gamma = operations * unit / (1 - operations * unit)
        bound = gamma * values.abs().sum(0) / size + operations * eta
    factor = size if claims.sum else 1
    return right * factor, bound * factor


def _flushed(dtype: str) -> float:
    """Return what a training run may lose of a number that it has set to be flushed to zero; nothing where that would be much."""
    smallest = torch.finfo(getattr(torch, dtype)).smallest_normal
    return smallest if smallest < 1e-30 else 0.0


def precision(dtype: str, claims: Claims) -> tuple[float, float, float]:
    """Return (unit roundoff, smallest subnormal, largest value) of the coarsest dtype on the way."""
    names = [dtype.replace("complex64", "float32").replace("complex128", "float64")]
    infos = [torch.finfo(getattr(torch, name)) for name in names + ([claims.rounded] if claims.rounded else [])]
    return (
        max(info.eps / 2 for info in infos),
        max(info.smallest_normal * info.eps for info in infos),
        min(info.max for info in infos),
    )


def compare(run: Run, step: int, claims: Claims, ranks: list[int] | None = None) -> Comparison:
    """Compare every element of every parameter on every rank at ``step`` with the oracle."""
    checked, margin, first, wrong = 0, 0.0, None, 0
    for rank in ranks if ranks is not None else range(run.world):
        for index in range(len(run.scenario.params)):
            if not run.receives(rank, step, index):
                continue
            right, bound, values = expected(run, rank, step, index, claims)
            got = run.got(rank, step, index)
            checked += right.numel()
            if got is None or got.numel() != right.numel():
                if right.numel():
                    wrong += right.numel()
                    first = first or Mismatch(rank, step, index, 0, right[0].item(), float("nan"), 0.0, 0, 0, missing=True)
                continue
            bad = ~_is_right(got, right, bound, values, precision(run.scenario.params[index].dtype, claims)[2])
            if bad.any():
                wrong += int(bad.sum())
                at = int(bad.nonzero()[0])
                first = first or Mismatch(rank, step, index, at, right[at].item(), got[at].item(), bound[at].item(), 0, 0)
            elif (bound > 0).any():
                within = got.isfinite() & (bound > 0)
                if within.any():
                    margin = max(margin, float(((got - right).abs()[within] / bound[within]).max()))
    if first:
        first.wrong, first.total = wrong, checked
    return Comparison(checked, margin, first)


def _is_right(got: torch.Tensor, right: torch.Tensor, bound: torch.Tensor, values: torch.Tensor, largest: float) -> torch.Tensor:
    same = (got == right) | (got.isnan() & right.isnan())
    if not (bound > 0).any():
        return same
    near = (got - right).abs() <= bound
    above = values.clamp(min=0).sum(0) * 1.01 >= largest  # 1.01 is far above 1 + gamma_k for any k here
    below = -values.clamp(max=0).sum(0) * 1.01 >= largest
    overflow = ((got == torch.inf) & above) | ((got == -torch.inf) & below) | (got.isnan() & above & below)
    return same | near | overflow
