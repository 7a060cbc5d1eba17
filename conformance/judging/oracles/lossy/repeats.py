"""Judge whether random results use the same random numbers twice within a step.

Let z be the errors of a step, each divided by the root mean square of its element over all draws;
elements that do not vary are zero. For two parameters a and b of n elements,

    c(k) = sum z_a(i) z_b(i + k) / sqrt(sum z_a(i)**2 sum z_b(i + k)**2)

over all draws, once over all elements, and once times the signs of the gradients, over places where
all ranks feed the same sign: magnitudes may be rounded, and signs be put back. If a and b are
rounded by the same random numbers, c(0) is the correlation of two indicators u < p and u < q, which
is

    (min(p, q) - p q) / sqrt(p (1 - p) q (1 - q))

and 1/2 on average over p and q. Independent numbers give 0 up to 1 / sqrt(n times the draws): below
1/50 for 64 elements and 40 draws, and twice that with equal signs. The limit is 1/4 more than at
other k. A compressor may send a whole layer, or none of it, with one draw: then c(k) is the same
for all k.

Within a bucket the same is done for z and itself, k elements later, for k from 256 to half of the
bucket: noise that repeats shows as a peak at its period, while blocks that are sent together have a
c(k) that falls slowly, or has ended before.
"""

from dataclasses import dataclass
from itertools import combinations

import torch

from conformance.judging.oracles.lossy.common import ROUNDINGS, JudgedRun, unit_roundoff
from conformance.judging.oracles.lossy.unbiased import Draws, draws_of

IN_COMMON = 1 / 4  # of the squares of the errors, more than at other distances
MOST_DRAWS = 40  # the last ones of a run
FEWEST = 64  # elements that two parameters have, to be compared
NEAREST = 256  # elements between two uses of the same number
_AROUND = 2  # places before and behind a peak


@dataclass(frozen=True)
class Relative:
    """Relative errors.

    Attributes:
        errors: ``[draws, numel]``; zero if an element is left out.
        counted: 1 for the elements that are not left out, and 0 for others, ``[numel]``.
    """

    errors: torch.Tensor
    counted: torch.Tensor

    def rolled(self, places: int) -> "Relative":
        return Relative(self.errors.roll(places, 1), self.counted.roll(places))


def require_other_numbers(judged: JudgedRun, steps: range) -> None:
    """Require that no two places of a step have errors from the same random numbers.

    Results are the same on all ranks (rule 3.1): rank 0 is judged.
    """
    draws = draws_of(judged, 0, steps[-MOST_DRAWS:])
    if draws is None:
        return
    for along_signs in (False, True):
        relative = {index: _relative(judged, draws, index, along_signs) for index in draws.errors}
        for index, other in combinations(relative, 2):
            names = " and ".join(judged.run.parameter_name(one) for one in (index, other))
            if not _require_apart(judged, names, relative[index], relative[other]):
                return
        for call in judged.run.ranks[0].all("call", step=steps[-1]):
            members = [i for i in judged.receiving(0, steps[-1], call) if i in relative]
            parts = [relative[i] for i in members]
            if parts and not _require_no_period(judged, call["index"], parts):
                return


def _relative(judged: JudgedRun, draws: Draws, index: int, along_signs: bool) -> Relative:
    errors = draws.errors[index]
    sizes = errors.square().mean(0).sqrt()
    largest = draws.means[index].abs().amax(0)
    varies = sizes > ROUNDINGS * unit_roundoff(judged.run, index) * largest
    errors = torch.where(varies, errors / sizes.clamp(min=1e-300), 0)
    if not along_signs:
        return Relative(errors, varies.double())
    last = draws.steps[-1]
    signs = [judged.run.fed(rank, last, index).sign() for rank in judged.group(0)]
    agree = torch.stack(signs).sum(0) / len(signs)
    agree = torch.where((agree.abs() == 1) & varies, agree, 0)
    return Relative(errors * agree, agree.abs())


def _require_apart(judged: JudgedRun, names: str, one: Relative, other: Relative) -> bool:
    numel = len(one.counted)
    if len(other.counted) != numel or numel < FEWEST:
        return True
    shifts = (numel // 5, numel // 3, numel // 2, 2 * numel // 3)
    elsewhere = max(_in_common(one, other.rolled(places)) for places in shifts)
    share = _in_common(one, other) - max(0.0, elsewhere)
    return _require_little(judged, f"parameters {names}", share, numel)


def _in_common(one: Relative, other: Relative) -> float:
    first = float((one.errors * other.counted).norm())
    second = float((other.errors * one.counted).norm())
    return float((one.errors * other.errors).sum()) / max(first * second, 1e-300)


def _require_no_period(judged: JudgedRun, bucket: int, parts: list[Relative]) -> bool:
    errors = torch.cat([part.errors for part in parts], dim=1)
    counted = torch.cat([part.counted for part in parts])
    numel = len(counted)
    if numel < 2 * NEAREST:
        return True
    products = _products(errors)
    pairs = _products(counted.unsqueeze(0))
    if float(products[0]) <= 0:
        return True
    typical = products[0] / pairs[0]
    # Where few pairs are left, the share would be one of chance.
    shares = torch.where(pairs >= FEWEST, products / (typical * pairs.clamp(min=1)), 0)
    around = [shares.roll(places) for places in range(-_AROUND, _AROUND + 1) if places]
    peaks = shares - torch.stack(around).amax(0).clamp(min=0)
    peaks = peaks[NEAREST:-_AROUND]
    apart = int(peaks.argmax()) + NEAREST
    place = f"bucket {bucket} of {numel} elements, {apart} elements apart"
    return _require_little(judged, place, float(peaks.max()), len(peaks))


def _products(rows: torch.Tensor) -> torch.Tensor:
    """Return the sums of the products of elements that are k apart, for k up to half of a row."""
    numel = rows.size(1)
    # By the theorem of Wiener and Khinchin.
    spectrum = torch.fft.rfft(rows, 2 * numel).abs().square().sum(0)
    return torch.fft.irfft(spectrum, 2 * numel)[: numel // 2 + 1 + _AROUND]


def _require_little(judged: JudgedRun, place: str, share: float, checks: int) -> bool:
    holds = judged.found.require(
        share <= IN_COMMON,
        f"errors whose correlation is at most {IN_COMMON:g} higher than at other distances between "
        "elements",
        f"{place}: {share:.3g} higher",
        "the same random numbers are used twice in a step: a generator that is seeded by a shape, "
        "or a block of noise that is used again"
        if share > IN_COMMON
        else "",
    )
    if holds:
        judged.found.checked(checks, max(0.0, share) / IN_COMMON)
    return holds
