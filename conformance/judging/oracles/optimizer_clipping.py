"""Right steps of an optimizer that clips gradients by the norm of all of them.

With g the gradients that the parameters have, all ranks alike, n the root of the sum of the squares
of all their elements, c the largest norm and lr the rate of a parameter's group, a step is

    x <- x - lr f g,  f = min(1, c / n);  f = 1 in steps before which nothing is clipped.

With an averager, gradients and their norm are those of each rank. Steps have no momentum, and each
is judged from the recorded parameters before it.

Bounds. The squares of N elements are added in any order, also in parts whose roots are squared
again: at most N + 8 roundings of half an epsilon, all terms being positive, of which the root
leaves half. torch takes c / (n + 1e-6). The quotient, and its product with g, round once each, and
so do the rate, its product, and the difference. With u = eps / 2, the errors are

    E(n) / n = (N + 10) u / 2,   E(f) / f = E(n) / n + 1e-6 / n + 2 u,
    E(x) = lr f |g| (E(f) / f + 3 u) + u |x|

if c is below n, and otherwise those without E(f). The bounds are twice as large. The share c / n is
at least a tenth away from 1, so that no rounding decides whether gradients are clipped.
"""

import math
from dataclasses import dataclass

import torch

from conformance.judging.oracles.optimizer import note_added_groups
from conformance.judging.oracles.optimizer_gradients import gradient_of_step
from conformance.judging.oracles.optimizer_steps import result, steps
from conformance.judging.verdict import Found
from conformance.records.run import Run, fed
from conformance.scenarios.optimizer import START
from conformance.scenarios.optimizer_clipping import rate_of
from conformance.scenarios.optimizer_gradients import first_kind

_ADDED = 1e-6  # to the norm, by torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class _Clip:
    """The clipping before one step of one rank.

    Attributes:
        norm: of all gradients.
        norm_error: the bound of its relative error.
        max_norm: the largest norm, or None if gradients are not clipped.
    """

    norm: float
    norm_error: float
    max_norm: float | None

    @property
    def factor(self) -> float:
        """The factor of all gradients."""
        return 1.0 if self.max_norm is None else min(1.0, self.max_norm / self.norm)

    @property
    def factor_error(self) -> float:
        """The bound of the relative error of the factor."""
        return 0.0 if self.factor == 1 else self.norm_error + 2 * _ADDED / self.norm + 2 * _EPS


_EPS = torch.finfo(torch.float32).eps


def require_clipped_steps(run: Run, found: Found) -> None:
    """Require that gradients are clipped by their norm, and that it is returned, if a number is."""
    clips = {}
    note_added_groups(run, found)
    for rank, step in steps(run):
        grads = [gradient_of_step(run, rank, step, i) for i in range(len(run.scenario.params))]
        clip = clips[rank, step] = _clip_of(run, rank, step, grads)
        for index, grad in enumerate(grads):
            if grad is not None:
                _require_step(run, found, clip, (rank, step, index), grad)
    # A wrong step shows more than a wrong number.
    for (rank, step), clip in clips.items():
        _require_returned(run, found, clip, rank, step)


def _clip_of(run: Run, rank: int, step: int, grads: list[torch.Tensor | None]) -> _Clip:
    there = torch.cat([grad for grad in grads if grad is not None])
    event = run.ranks[rank].first("clipped", step=step)
    max_norm = None if event is None else event["max_norm"]
    return _Clip(float(there.norm()), (len(there) + 10) * _EPS / 2, max_norm)


def _require_returned(run: Run, found: Found, clip: _Clip, rank: int, step: int) -> None:
    event = run.ranks[rank].first("clipped", step=step)
    if event is None or event["returned"] is None:
        return
    returned = event["returned"]
    tolerance = 2 * (clip.norm_error + _ADDED / clip.norm)
    # It may be the norm after clipping, too.
    norms = (clip.norm, clip.norm * clip.factor)
    found.require(
        any(math.isclose(returned, norm, rel_tol=tolerance) for norm in norms),
        f"the norm of all gradients, {clip.norm:.6g}, if a number is returned",
        f"rank {rank}, step {step}: {event['method']}({clip.max_norm:.6g}) returned {returned:.6g}",
    )


def _require_step(
    run: Run, found: Found, clip: _Clip, place: tuple[int, int, int], grad: torch.Tensor
) -> None:
    """Require the step of one parameter by its clipped gradient."""
    rank, step, index = place
    rate = rate_of(run.scenario, index)
    before = _before(run, rank, step, index)
    got = result(run, rank, step, index)
    update = rate * clip.factor * grad
    expected = before - update
    error = update.abs() * (clip.factor_error + 3 * _EPS) + _EPS * expected.abs()
    wrong = ((got - expected).abs() > error).nonzero()
    found.checked(1)
    if not len(wrong):
        return
    # The largest gradient shows the factor best.
    at = int(wrong[grad[wrong].abs().argmax()])
    actual = float((before[at] - got[at]) / (rate * grad[at]))
    wanted = f"a step with {clip.factor:.6g} of each gradient: the norm of all is {clip.norm:.6g}"
    if clip.max_norm is not None:
        wanted += f", the largest norm {clip.max_norm:.6g}"
    found.require(
        False,
        wanted,
        f"rank {rank}, step {step}, p{index}, index {at}: a step with {actual:.6g} of the "
        f"gradient ({len(wrong)} of {len(got)} elements differ)",
        _cause(clip, actual),
    )


def _before(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return a parameter before a step, flat in float64."""
    if step:
        return result(run, rank, step - 1, index)
    group = run.group(rank)
    spec = run.scenario.params[index]
    return fed(first_kind(run.scenario), spec, len(group), group[0], START, index)


def _cause(clip: _Clip, actual: float) -> str:
    """Return the known mistake that gives this factor, or an empty text if none does."""
    if clip.max_norm is None:
        return "gradients are clipped in a step before which clip_grad_norm was not called"
    if math.isclose(actual, 1.0, rel_tol=1e-3):
        return "it was not clipped"
    norm = clip.max_norm / actual
    kind = "smaller" if norm < clip.norm else "larger"
    return f"it was clipped by a {kind} norm, {norm:.6g}" if actual > 0 else ""
