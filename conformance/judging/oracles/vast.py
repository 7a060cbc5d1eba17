"""Judge large lossy results by their moments (``ranks/instruments/moments.py``).

Let x_r be the gradient of rank r, m the mean and s = sqrt(1 - delta). One step feeds x_r.

    compressed          n - 1 steps of zeros follow. A residual is at most s ||x_r|| after the step
                        that feeds, and s times as long after each step of zeros. The results sum to
                        m minus the mean of the residuals, so that
                        ||sum(y) - m|| <= s**n mean_r ||x_r||
    compressed(ef21)    the same gradient is fed in n steps. Each step shortens what is left of it
                        by s: ||y_n - m|| <= s**n mean_r ||x_r||
    compressed(False)   ||y - m|| <= s mean_r ||x_r|| in each step

A compressor may select elements at random, and keep the share delta on average. By Hoeffding's
inequality, which holds for draws without replacement too, the share of n elements of nearly one
size that a step leaves exceeds 1 - delta by 3 / sqrt(n) with probability below 2e-8. That much is
added to the square of the bound for each step of the two claims with feedback.

If a faint step, 2**-20 of the gradients, precedes, then its residual and its mean are added to the
bound. These hold for the whole model, since they hold for each part that is compressed by itself
(for compressed(False), by Minkowski's inequality over the ranks).

Under unbiased(noise=d) every element of every parameter has noise, so that
||y - m||**2 is at least n d**2 / W, as if W ranks drew theirs apart, or n d**2 / W**2 if one rank
alone does; a factor of 1.5 is allowed to
the root. It is required of n = 1,000 elements on, where the root of a mean square of Laplace's
noise is off by 0.035 (one deviation), and by a third with no probability that counts.

Under unbiased two draws of one bucket prove little about their expectation: a right hook may send
a bucket in half of the steps, twice as large. But buckets of other sizes show how far its draws
are off. Let e = <y, m> / ||m||**2 - 1, of a parameter that is a bucket by itself. From 2**18
elements on, a parameter or an eighth of its rows is refused if both draws are off to the same side,
by more than 0.7 and more than twice the largest |e| among the parameters of 1,000 to 2**18
elements; there are 35 of these and more. A part that is not sent has e = -1, one that is not
divided or is another rank's has 1 and more or -0.9. If elements are independent draws, e falls as
the bucket grows: by n**(-1/4) for levels that are a share of the bucket's norm, and by n**(-1/2) if
elements are left out. If whole buckets are left out, with the probability q, then none of 70 draws
shows it and both of a large bucket do with a probability of (1 - q)**70 q**2, at most 1.1e-4.

The last elements of the matrix cost next to nothing of its norm. The squares of all results
together are therefore compared between windows of one length: 32 at drawn places beyond element
2**24, where gradients have one scale, and one on the last elements. A compressor may leave out some
windows, by chance or by choice. But if the largest of the 32 is at most twice the smallest one,
then elements come out alike everywhere, and the last ones have to come out as well. If a window
gets a number of elements, or of blocks, that is Poisson distributed, then 32 windows are that much
alike and another one gets none with a probability of at most 4e-8, at a mean of 7 (computed). A
64th part of the smallest window is less than one element.

The distance is computed from ||y - m||**2 = ||y||**2 - 2 <y, m> + ||m||**2, in float64. The sum of
a few results is rounded to float32, relative to each partial sum. The square is then off by less
than 1e-6 of (||y|| + ||m||)**2: that much is allowed.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.gradients import table
from conformance.scenarios.tables import BEYOND, rows, windows
from conformance.subjects.claims import CONTRACTION, FEEDBACK, Claims

ROUNDING = 1e-6
LARGE = 1 << 18  # elements of a bucket whose draws are compared with those of smaller ones
FEWEST = 1000  # elements that these have at least, and a parameter whose noise is judged
OFF = 0.7  # of the mean
_PARTS = 8  # of a large parameter
ALIKE = 2.0  # the largest window, in units of the smallest one
MISSING = 1 / 64  # of the smallest window
FAINT = 2.0**-18  # of the gradients: more than a faint step feeds, and leaves in a residual


@dataclass(frozen=True)
class _Fed:
    """The gradients.

    Attributes:
        step: the first step that feeds them.
        means: the squares of the mean, by row of the table.
        norms: the norms of each rank's gradients, by parameter.
        parameters: the parameter of each row.
    """

    step: int
    means: torch.Tensor
    norms: torch.Tensor
    parameters: torch.Tensor


def require_finite(run: Run, claims: Claims, found: Found) -> None:
    """Require finite results of all lossy steps."""
    for rank in range(run.world):
        for step in range(claims.warmup, len(run.scenario.steps)):
            moments = _moments(run, rank, step, "result", found)
            if moments is None:
                return
            found.checked(sum(math.prod(spec.shape) for spec in run.scenario.params))


def require_last_elements(run: Run, found: Found) -> None:
    """Require the last elements of the matrix to come out if windows elsewhere all do, alike."""
    last = len(run.scenario.steps) - 1
    numel = max(math.prod(spec.shape) for spec in run.scenario.params)
    if numel <= BEYOND:
        return  # no windows are recorded
    places = windows(numel, run.scenario.session_seed)
    for rank in run.ranks:
        recorded = rank.tensors.get(f"{last}/moments/windows")
        if recorded is None:
            continue
        for (length, begins), squares in zip(places.items(), recorded, strict=True):
            tail, others = float(squares[0]), squares[1:]
            least = float(others.min())
            found.checked(1)
            if least > 0 and float(others.max()) <= ALIKE * least:
                found.require(
                    tail >= MISSING * least,
                    f"results other than zero for the last {length} elements, as for {length} "
                    "elements elsewhere",
                    f"rank {rank.rank}: from element {begins[0]} on, the squares of the results "
                    f"add up to {tail:.3g}; at {len(others)} other places, those of as many "
                    f"elements add up to {least:.3g} or more",
                    "the last block, which is shorter than the others, may never be sent",
                )


def require_alike_sizes(run: Run, claims: Claims, found: Found) -> None:
    """Require random results of large buckets to be as near to the mean as those of smaller ones,
    in one of the steps that feed the heavy gradients.
    """
    fed = _fed(run)
    steps = range(max(fed.step, claims.warmup), len(run.scenario.steps))
    numels = torch.tensor([math.prod(spec.shape) for spec in run.scenario.params])
    is_smaller = (numels >= FEWEST) & (numels < LARGE)
    parts = _parts(fed, numels)
    for rank in range(run.world):
        moments = [_moments(run, rank, step, "result", found) for step in steps]
        if found.failures:
            return
        along = torch.stack([one[:, :-1].mean(1) for one in moments if one is not None])
        of_parameters = torch.stack(
            [
                _by_parameter(one, fed, len(numels)) / _by_parameter(fed.means, fed, len(numels))
                for one in along
            ]
        )
        usual = float((of_parameters[:, is_smaller] - 1).abs().max())
        bound = max(OFF, ALIKE * usual)
        for index, members in parts:
            offs = along[:, members].sum(1) / fed.means[members].sum() - 1
            least = float(offs.abs().min())
            same_side = bool((offs > 0).all() or (offs < 0).all())
            numel = int(numels[index])
            holds = found.require(
                not same_side or least <= bound,
                f"{1 - bound:.3g} to {1 + bound:.3g} times the mean in at least one of "
                f"{len(steps)} draws: parameters of fewer than {LARGE} elements are off by at most "
                f"{usual:.3g} of the mean in each draw",
                f"rank {rank}: {', '.join(f'{1 + float(off):.3g}' for off in offs)} times the "
                f"mean, one number for each draw, in {_elements(run, fed, index, members)} of "
                f"parameter {run.parameter_name(index)} with {numel} elements",
                "large buckets may take another path through the code",
            )
            if not holds:
                return
            found.checked(len(steps))


def _first_row(fed: _Fed, index: int) -> int:
    """Return the place of a parameter's first row among the rows of all parameters."""
    return int((fed.parameters == index).nonzero()[0])


def _elements(run: Run, fed: _Fed, index: int, members: slice) -> str:
    """Return the first and the last element of some rows of a parameter, in words."""
    spec = run.scenario.params[index]
    of_parameter = list(rows(math.prod(spec.shape), run.scenario.period, index, spec.exponent))
    first = _first_row(fed, index)
    begin = of_parameter[members.start - first].begin
    return f"elements {begin} to {of_parameter[members.stop - 1 - first].end - 1}"


def _parts(fed: _Fed, numels: torch.Tensor) -> list[tuple[int, slice]]:
    """Return each large parameter with all its rows, and with each eighth."""
    parts = []
    for index in (numels >= LARGE).nonzero().flatten().tolist():
        first = _first_row(fed, index)
        count = int((fed.parameters == index).sum())
        edges = sorted({round(count * part / _PARTS) for part in range(_PARTS + 1)})
        parts.append((index, slice(first, first + count)))
        parts += [(index, slice(first + a, first + b)) for a, b in pairwise(edges)]
    return parts


def require_noise(run: Run, claims: Claims, found: Found) -> None:
    """Require the claimed noise in each parameter, in all steps that feed the heavy gradients."""
    fed = _fed(run)
    count = len(run.scenario.params)
    numels = torch.tensor([math.prod(spec.shape) for spec in run.scenario.params]).double()
    least = claims.least_noise(run.world) / 1.5
    for rank in range(run.world):
        for step in range(max(fed.step, claims.warmup), len(run.scenario.steps)):
            moments = _moments(run, rank, step, "result", found)
            if moments is None:
                return
            squares = _by_parameter(moments[:, -1], fed, count)
            along = _by_parameter(moments[:, :-1].mean(1), fed, count)
            means = _by_parameter(fed.means, fed, count)
            slack = ROUNDING * (squares.sqrt() + means.sqrt()).square()
            sizes = ((squares - 2 * along + means + slack).clamp(min=0) / numels).sqrt()
            sizes[numels < FEWEST] = torch.inf
            worst = int(sizes.argmin())
            shape = list(run.scenario.params[worst].shape)
            place = f"parameter {run.parameter_name(worst)} of {shape}"
            holds = found.require(
                bool((sizes >= least).all()),
                f"noise with a root mean square of {least:.3g} at least",
                f"rank {rank}, step {step}: {float(sizes[worst]):.3g} in {place}",
                "a part of its elements has no noise",
            )
            if not holds:
                return
            found.checked(int(numels.sum()))


def require_contracted(run: Run, claims: Claims, found: Found) -> None:
    """Require the bound of the claimed delta; report the first violation.

    It is required of each parameter if each has a bucket of its own, and else of all together.
    """
    scenario = run.scenario
    fed = _fed(run)
    first = fed.step
    steps = range(first, len(scenario.steps))
    share = math.sqrt(1 - claims.delta)
    apart = first > claims.warmup
    for rank in range(run.world):
        if claims.lossy == CONTRACTION:
            holds = all(
                _within(run, rank, step, "result", share, fed, claims, found, apart=apart)
                for step in steps
            )
        else:
            name = "sum" if claims.lossy == FEEDBACK else "result"
            left = share ** len(steps)
            holds = _within(run, rank, steps[-1], name, left, fed, claims, found, apart=apart)
        if not holds:
            return


def _within(
    run: Run,
    rank: int,
    step: int,
    name: str,
    share: float,
    fed: _Fed,
    claims: Claims,
    found: Found,
    *,
    apart: bool,
) -> bool:
    """Require ||y - m|| <= share * mean_r ||x_r|| of one rank, up to rounding."""
    moments = _moments(run, rank, step, name, found)
    if moments is None:
        return False
    count = len(run.scenario.params)
    by_row = {
        "along": moments[:, :-1].mean(1),
        "squares": moments[:, -1],
        "means": fed.means,
    }
    sums = {key: _by_parameter(values, fed, count) for key, values in by_row.items()}
    numels = torch.tensor([math.prod(spec.shape) for spec in run.scenario.params]).double()
    if not apart:
        numels = numels.sum().expand(count)
    draws = 0 if claims.lossy == CONTRACTION else step + 1 - fed.step
    chance = 3 * draws / numels.sqrt()
    norms = fed.norms
    faint = FAINT * float(norms.square().sum(1).sqrt().mean()) if apart else 0.0
    offs = sums["squares"] - 2 * sums["along"] + sums["means"]
    slack = ROUNDING * (sums["squares"].sqrt() + sums["means"].sqrt()).square()
    if not apart:
        offs = offs.sum().expand(count)
        slack = slack.sum().expand(count)
        norms = norms.square().sum(1, keepdim=True).sqrt().expand(-1, count)
    of_gradients = norms.mean(0)
    offs = (offs - slack).clamp(min=0).sqrt()
    bounds = (share**2 + chance).sqrt() * of_gradients + faint
    worst = int((offs / bounds).argmax()) if apart else int(sums["means"].argmax())
    away = float(offs[worst] / of_gradients[worst])
    ratio = float(sums["along"][worst] / sums["means"][worst])
    place = f"parameter {run.parameter_name(worst)} of {list(run.scenario.params[worst].shape)}"
    result = "the sum of all results" if name == "sum" else "the result"
    holds = found.require(
        bool((offs <= bounds).all()),
        f"{result} within {share:.3g} of the gradients from the mean",
        f"rank {rank}, step {step}: {away:.3g} of the gradients away, in {place}",
        f"in that parameter it is {ratio:.3g} times the mean, along the mean",
    )
    if holds:
        numel = sum(math.prod(spec.shape) for spec in run.scenario.params)
        found.checked(numel, float((offs / bounds).max()))
    return holds


def _by_parameter(values: torch.Tensor, fed: _Fed, count: int) -> torch.Tensor:
    """Return the sums over each parameter's rows."""
    return torch.zeros(count, dtype=torch.float64).index_add_(0, fed.parameters, values)


def _moments(run: Run, rank: int, step: int, name: str, found: Found) -> torch.Tensor | None:
    """Return the moments of a step; if a result is missing or not finite, record it."""
    event = run.ranks[rank].first("folded", step=step)
    missing = event["missing"] if event else ["all"]
    place = f"rank {rank}, step {step}"
    names = ", ".join(missing[:3])
    if not found.require(not missing, "a gradient", f"{place}: none of {names}"):
        return None
    moments = run.ranks[rank].tensors[f"{step}/moments/{name}"]
    finite = bool(moments.isfinite().all())
    if not found.require(finite, "finite values for finite gradients", f"{place}: some are not"):
        return None
    return moments


def _fed(run: Run) -> _Fed:
    """Return the heavy gradients that ranks feed."""
    scenario = run.scenario
    step = next(at for at, kind in enumerate(scenario.steps) if kind.startswith("heavy"))
    tables = torch.stack(
        [
            table(
                scenario.steps[step],
                torch.float32,
                world=run.world,
                rank=rank,
                step=0,
                period=scenario.period,
            )
            for rank in range(run.world)
        ]
    ).double()
    squares = torch.cat([tables.square(), tables.mean(0, keepdim=True).square()])
    # Sums over any part of the table are differences of these.
    before = torch.cat([torch.zeros(len(squares), 1, dtype=torch.float64), squares.cumsum(1)], 1)
    sums = []
    parameters = []
    for index, spec in enumerate(scenario.params):
        for row in rows(math.prod(spec.shape), scenario.period, index, spec.exponent):
            end = row.column + row.end - row.begin
            sums.append((before[:, end] - before[:, row.column]) * row.sign**2)
            parameters.append(index)
    by_row = torch.stack(sums)
    norms = torch.zeros(run.world, len(scenario.params), dtype=torch.float64)
    norms.index_add_(1, torch.tensor(parameters), by_row[:, :-1].t())
    return _Fed(step, by_row[:, -1], norms.sqrt(), torch.tensor(parameters))
