"""Judge the results of every step of a long run (``scenarios/long_runs.py``).

A row of the record is the sum y of the results of a round, which is B consecutive steps on the same
gradients; B is 1 unless ``--steps`` asks for more steps than a record has rows. Let x_r be the
gradient of rank r, m the mean, and g = mean_r ||x_r|| over the whole model.

    exact           y = B m, within B times the bound of ``oracles/mean.py``
    compressed      in each round, of all results and means so far after the warm-up,
                    ||sum y - sum m|| <= 2 R + U + rounding
    ef21            in each round, ||y - B m|| <= 2 (sum of E over the round's steps) + rounding
    contraction     in each round, ||y - B m|| <= B sqrt(1 - delta) g + rounding
    unbiased        the errors of all rounds cancel out, and are not correlated in time
    local           y = B sum_q w_q x_q: weights of at least 0 that sum to 1, the same for every
                    element of a parameter, this rank's own above 0; over the ranks they sum to 1

Compressed with feedback. A rank compresses p = x + e, and keeps e' = p - C(p). So the sum of all
results is the sum of all means, less the mean of the ranks' residuals e, however long the run is.
With s = sqrt(1 - delta), ||e'|| <= s ||p|| <= s (||e|| + ||x||), so that the mean norm of residuals
is at most R, where

    R' = s (R + g),     R = 0 after the warm-up

in every step. The faint gradients of a drain (2**-20) shrink it by s, and after enough steps it
is as good as 0. Compressors keep
their delta on average, not in each step; a residual that has lost its bulk may be uneven, and signs
keep less of it. So twice R is allowed, and U = min(1, s / (1 - s)) M / 4, a quarter of the largest
recent gradient or of the residual that it leaves: M' = max(g, sqrt(s) M), and a drain leaves M as
it is. A leak of 1 % of the residual in each step loses a quarter of a step within fifty steps,
results that are 3 % too short within ten, and a residual that is dropped once loses it at once.

Leaks. Before the drain at the end small gradients are fed (2**-10), until M has fallen to a 64th:
(1 - delta)**(k / 4) after k steps. R is 0 after the drain, and the sum over more than a thousand
steps is off by at most a 256th of a step, and the rounding, which is more for small deltas. A
constant part of the gradients, an eighth, is held back for as long as an element waits, and a leak
of a share q of the residual loses q of that in each step. Of a compressor that sends a quarter or a
half of the elements, 1200 steps with q = 1/1000 lose a tenth and a thirtieth of a step in simulated
runs: eight and four times the limit. Of a compressor that holds back little, a leak loses little.

Units. A hook that knows the learning rate may hold back parts of updates, in place of gradients: it
multiplies a residual by the rate of the step before, and divides it by that of this step (Zheng et
al., Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, NeurIPS 2019).
Then the same holds for results, means and residuals times the learning rate of their steps. One of
the two has to hold over the whole run; with ``--steps`` it is the first, if a round has several
steps.

What signs leave, whose residual is uneven, goes on coming out ("Slow compressors" in
``oracles/lossy``): the sum may be off by more if all elements of at least half the largest missing
value come out in the last half of the drain, by a 4n-th part of it a step, for the n elements of
the model. What a leak has lost does not come out.

EF21. A rank keeps an estimate h of its gradient: h' = h + C(x - h). With E the mean norm of x - h,
E' = s (E + change of x). The result is the mean of the estimates, and at most E off.

Rounding. Each of n steps rounds its result in ROUNDINGS operations, which are relative to values of
the size of g + R. So ROUNDINGS u (sum of g + R over the steps so far) is allowed, with u the unit
roundoff.

Unbiased. The errors d_t along a direction cancel out if |sum d_t| <= 6 sqrt(sum d_t**2) + 12 max
|d_t| (``oracles/lossy.py``). Directions are computed from the mean of each round alone: the mean
itself, its signs, all ones, and three from a hash. They are fixed before the draws, so that the
argument holds for gradients that change, too. Over a thousand draws a bias of a fifth of the
errors' deviation along a direction is found: results that are 3 % too short, for three levels.

Growth. In 96 rounds gradients are 8 times as large as in any of the 60 rounds before, or more
(``scenarios/growth.py``). Errors and means of a round are divided by the factor by which its
gradients have grown: it is fixed before the draws. The errors of these rounds cancel out by
themselves, too. A hook whose range has no such margin cuts off most of each gradient, so that all
of them are off by about the same: n equal errors exceed 6 sqrt(n) + 12 from n = 58 on.

Small parameters. A parameter of few elements has errors that may be seldom and large. Two things
are required of it nevertheless. Its results are not zero from the beginning of an eighth of the run
to the end, if 36 elements have come before it, and if as many should have come after it. So many
come at half the rate of the other parameters (their median), times the ratio of the two rates
before. A right hook then sends none with a probability below e**-36. And its errors cancel out over
the last eighths of the run that have 8 errors or more of either sign along the mean, each of them:
up to a twentieth of a typical element, as in ``oracles/lossy``.

Errors in time. If draws are independent of all earlier ones and unbiased, q_t = <e_t, e_(t+k)> has
no expectation given the past, for each lag k. The limit for |sum q_t| is the same with 7 instead of
6: by Efron (JASA 1969) one lag exceeds it with probability below 2 exp(-7**2 / 2) < 5e-11, and one
of all lags of a run below 1e-7. Errors that repeat after k steps give q_t = ||e_t||**2.

Noise of ranks. Some rounds feed the same gradients on all ranks, others feed them on rank 0 alone.
Independent errors of W ranks have W times the variance of the errors of one, and equal errors have
W**2 times. The limit is between them, W**1.5: the norms of a hundred rounds of a thousand elements
are within a few percent.

Local. The weights are least squares of some independent columns, exact up to rounding. A bucket has
one pair of weights, and each of its parameters shows them if it has at least four elements a rank.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from conformance.judging.oracles.mean import expected_of_inputs, is_right, precision
from conformance.judging.verdict import Found
from conformance.records.run import Run, fed
from conformance.scenarios.evaluations import Evaluation, evaluations
from conformance.scenarios.feed import Feed, feed_of
from conformance.scenarios.growth import growth_of
from conformance.scenarios.learning_rates import learning_rates
from conformance.scenarios.model import DRAINING
from conformance.subjects.claims import CONTRACTION, DIFFERENCE, FEEDBACK, Claims

ROUNDINGS = 16  # units in the last place that every claim is allowed, as in ``oracles/lossy.py``
UNEVEN = 1 / 4  # of a recent gradient: see "Compressed with feedback"
NOMINAL = 2.0  # times the bound of a compressor that keeps its delta in each step
MOST_OF_THEM = 0.9  # zeros are right, whatever a hook multiplies them by


@dataclass(eq=False)
class LongRecord:
    """One long run under one claim, in float64.

    Attributes:
        run: the run.
        claims: the claims.
        in_updates: results, means and residuals are multiplied by the learning rate of their round.
    """

    run: Run
    claims: Claims
    in_updates: bool = False

    @cached_property
    def feed(self) -> Feed:
        return feed_of(self.run.scenario)

    @cached_property
    def evaluations(self) -> Mapping[int, Evaluation]:
        """The evaluations of the model, by step."""
        return evaluations(self.run.scenario)

    @property
    def warm_up(self) -> int:
        """The number of rounds of the warm-up."""
        return self.run.scenario.long_run.warm_up

    def drains(self, place: int) -> bool:
        """Whether a place of the tables has faint gradients, which empty residuals."""
        return self.feed.keys[place][0] in DRAINING

    @cached_property
    def drain(self) -> int:
        """The first round at the end that empties residuals."""
        begin = self.feed.rounds
        while begin and self.drains(self.feed.places[begin - 1]):
            begin -= 1
        return begin

    @cached_property
    def ebb(self) -> int:
        """The first round of the small gradients before ``drain``; ``drain`` if there are none."""
        begin = self.drain
        while begin and self.feed.keys[self.feed.places[begin - 1]][0] == "small":
            begin -= 1
        return begin

    @cached_property
    def counts(self) -> torch.Tensor:
        """The number of steps of each round."""
        first = torch.tensor(self.feed.first_steps, dtype=torch.float64)
        return first[1:] - first[:-1]

    @cached_property
    def places(self) -> torch.Tensor:
        """The place of each round's gradient in the tables."""
        return torch.tensor(self.feed.places)

    @cached_property
    def indices(self) -> list[int]:
        """The numbers of the parameters."""
        return list(range(len(self.run.scenario.params)))

    def unit(self) -> float:
        """Return the unit roundoff of the parameters."""
        return max(precision(spec.dtype, Claims())[0] for spec in self.run.scenario.params)

    def inputs(self, rank: int, index: int) -> torch.Tensor:
        """Return the different gradients of a rank, ``[keys, numel]``."""
        spec = self.run.scenario.params[index]
        return torch.stack(
            [
                fed(kind, spec, self.run.world, rank, number, index)
                for kind, number in self.feed.keys
            ]
        )

    @cached_property
    def means(self) -> list[torch.Tensor]:
        """The means of the different gradients by parameter, ``[keys, numel]``."""
        ranks = range(self.run.world)
        return [
            torch.stack([self.inputs(rank, index) for rank in ranks]).mean(0)
            for index in self.indices
        ]

    @cached_property
    def growth(self) -> torch.Tensor:
        """The factor by which the gradients of each round have grown."""
        exponents = [growth_of(self.feed.keys[place][0]) for place in self.feed.places]
        return 2.0 ** torch.tensor(exponents, dtype=torch.float64)

    @cached_property
    def factors(self) -> torch.Tensor:
        """What each round's gradients are multiplied by: 1, or the learning rate."""
        rates = learning_rates(self.run.scenario) if self.in_updates else ()
        if not rates:
            return torch.ones(self.feed.rounds, dtype=torch.float64)
        return torch.tensor([rates[step] for step in self.feed.first_steps[:-1]]).double()

    def wanted(self, index: int) -> torch.Tensor:
        """Return the sums of means of a parameter in each round, ``[rounds, numel]``."""
        return self.means[index][self.places] * (self.counts * self.factors).unsqueeze(1)

    @cached_property
    def norms(self) -> torch.Tensor:
        """g of each of the different gradients: the mean norm over ranks, of the whole model."""
        squares = torch.stack(
            [
                sum(
                    (self.inputs(rank, index).square().sum(1) for index in self.indices),
                    torch.zeros(len(self.feed.keys), dtype=torch.float64),
                )
                for rank in range(self.run.world)
            ]
        )
        return squares.sqrt().mean(0)

    def results(self, rank: int, index: int) -> torch.Tensor | None:
        """Return the results of a parameter, ``[rounds, numel]``, or None if there are none."""
        return self._rows(rank, f"long/{self.run.parameter_name(index)}")

    def followed(self, rank: int, index: int) -> torch.Tensor | None:
        """Return the values of a parameter after each round, or None if they are not on record."""
        return self._rows(rank, f"long/parameter/{self.run.parameter_name(index)}")

    def _rows(self, rank: int, name: str) -> torch.Tensor | None:
        rows = self.run.ranks[rank].tensors.get(name)
        if rows is None or len(rows) != self.feed.rounds:
            return None
        return rows.double() * self.factors.unsqueeze(1) if self.in_updates else rows.double()

    def complete(self, found: Found) -> bool:
        """Require results of every parameter on every rank; return whether there are."""
        for rank in range(self.run.world):
            for index in self.indices:
                name = self.run.parameter_name(index)
                has_results = self.results(rank, index) is not None
                place = f"rank {rank}, parameter {name}"
                if not found.require(has_results, "results of every step", f"{place}: none"):
                    return False
        return True

    def different_ranks(self, index: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield ranks with their results, but no rank whose results are those of rank 0."""
        first = self.results(0, index)
        for rank in range(self.run.world):
            rows = self.results(rank, index)
            if rows is None or first is None:
                continue
            same = (rows == first) | (rows.isnan() & first.isnan())
            if rank == 0 or not bool(same.all()):
                yield rank, rows

    def last_step(self, number: int) -> int:
        """Return the last step of a round."""
        return self.feed.steps_of(number)[-1]

    def place(self, rank: int, number: int, index: int | None = None) -> str:
        """Return the words for a round of a rank."""
        steps = self.feed.steps_of(number)
        step = f"step {steps[0]}"
        if len(steps) > 1:
            step = f"steps {steps[0]} to {steps[-1]}"
        words = f"rank {rank}, {step}"
        return words if index is None else f"{words}, parameter {self.run.parameter_name(index)}"


def pattern(wrong: torch.Tensor, record: LongRecord) -> str:
    """Return in words which rounds are wrong, from a mask ``[rounds]`` with at least one."""
    feed = record.feed
    numbers = wrong.nonzero().reshape(-1)
    steps = [feed.first_steps[int(number)] for number in numbers]
    count = f"{len(steps)} of {feed.rounds} are wrong"
    if feed.steps > feed.rounds:
        count = f"{len(steps)} of {feed.rounds} groups of steps are wrong"
    if len(steps) == 1:
        return f"this step alone, of {feed.steps}, is wrong"
    evaluated = {step for step, one in record.evaluations.items() if one.within_step}
    if evaluated.issuperset(steps):
        return (
            f"{count}: all of them have a forward without gradients between the step's forward and "
            "its backward"
        )
    if evaluated.union(record.evaluations).issuperset(steps):
        return f"{count}: all of them follow an evaluation of the model, or have one within"
    after = feed.rounds - int(numbers[0])
    if len(steps) >= MOST_OF_THEM * after:
        which = "all steps" if len(steps) == after else f"{len(steps)} of {after} steps"
        return f"{which} from step {steps[0]} on are wrong: look for a count of steps or calls"
    strides = {after - before for before, after in itertools.pairwise(steps)}
    if len(strides) == 1 and strides != {1}:
        return f"{count}: every {strides.pop()}th from step {steps[0]} on"
    return f"{count}, among them steps {', '.join(map(str, steps[:4]))}"


def require_exact(record: LongRecord, rounds: range, found: Found) -> bool:
    """Require exact, rounded or summed results of some rounds; report the first that is wrong."""
    wrong = torch.zeros(record.feed.rounds, dtype=torch.bool)
    first: tuple[int, str, str] | None = None
    for index in record.indices:
        for rank, rows in record.different_ranks(index):
            mistake = _compare(record, rank, index, rows, rounds, wrong, found)
            if mistake and (first is None or mistake[0] < first[0]):
                first = mistake
    if first is None:
        return True
    return found.require(False, first[1], first[2], pattern(wrong, record))


def _compare(
    record: LongRecord,
    rank: int,
    index: int,
    rows: torch.Tensor,
    rounds: range,
    wrong: torch.Tensor,
    found: Found,
) -> tuple[int, str, str] | None:
    """Compare one parameter of one rank, and mark wrong rounds.

    Returns:
        The first wrong round, with the expected and the actual value; None if there is none.
    """
    run = record.run
    spec = run.scenario.params[index]
    largest = precision(spec.dtype, record.claims)[2]
    group = tuple(range(run.world))
    feeding = (True,) * run.world
    first: tuple[int, str, str] | None = None
    selected = torch.zeros(record.feed.rounds, dtype=torch.bool)
    selected[rounds.start : rounds.stop] = True
    for place, (kind, number) in enumerate(record.feed.keys):
        at = ((record.places == place) & selected).nonzero().reshape(-1)
        if not len(at):
            continue
        inputs = expected_of_inputs(
            kind, spec, group, feeding, run.world, number, index, record.claims
        )
        right, bound, values = inputs.right, inputs.bound, inputs.values
        counts = record.counts[at].unsqueeze(1)
        got = rows[at]
        bad = ~is_right(got, right * counts, bound * counts, values, largest)
        found.checked(got.numel(), _margin(got, right * counts, bound * counts, bad))
        if not bad.any():
            continue
        wrong[at[bad.any(1)]] = True
        row, element = map(int, bad.nonzero()[0])
        if first is None or int(at[row]) < first[0]:
            times = int(counts[row])
            within = f" within {float(bound[element]):.3g}" if float(bound[element]) else ""
            expected = f"mean {float(right[element]):.9g}{within or ', bit for bit'}"
            value = float(got[row, element]) / times
            where = record.place(rank, int(at[row]), index)
            position = run.element_index(index, element)
            first = int(at[row]), expected, f"{value:.9g} on {where}, index {position}"
    return first


def _margin(
    got: torch.Tensor, right: torch.Tensor, bound: torch.Tensor, bad: torch.Tensor
) -> float | None:
    bounded = got.isfinite() & (bound > 0) & ~bad
    if not bounded.any():
        return None
    return float(((got - right).abs() / bound)[bounded].max())


def require_same_bits(record: LongRecord, found: Found) -> bool:
    """Require the same results on all ranks in every round."""
    for index in record.indices:
        first = record.results(0, index)
        for rank in range(1, record.run.world):
            rows = record.results(rank, index)
            assert first is not None
            assert rows is not None
            differs = ~((rows == first) | (rows.isnan() & first.isnan()))
            found.checked(rows.numel())
            if differs.any():
                number, element = map(int, differs.nonzero()[0])
                values = (
                    f"{float(first[number, element]):.9g} and {float(rows[number, element]):.9g}"
                )
                where = record.place(rank, number, index)
                return found.require(
                    False,
                    "the same bits on all ranks",
                    f"ranks 0 and {where}: {values}",
                    pattern(differs.any(1), record),
                )
    return True


def require_lossy(record: LongRecord, found: Found) -> bool:
    """Require the sums, estimates or distances of a compressed result, round by round."""
    if record.claims.lossy == FEEDBACK:
        return _require_sums(record, found)
    if record.claims.lossy == DIFFERENCE:
        return _require_near(record, estimate_bounds(record), found)
    assert record.claims.lossy == CONTRACTION
    share = math.sqrt(1 - record.claims.delta) + ROUNDINGS * record.unit()
    bounds = share * record.norms[record.places] * record.counts
    return _require_near(record, bounds, found)


def residual_bounds(record: LongRecord, after_ebb: bool = False) -> torch.Tensor:
    """Return the limit of the sum of errors after each round.

    Args:
        record: the run.
        after_ebb: an uneven residual fades while the small gradients at the end are fed, too.
    """
    falls_until = record.feed.rounds if after_ebb else record.ebb
    s = math.sqrt(1 - record.claims.delta)
    relative = min(1.0, s / (1 - s)) if s < 1 else 1.0
    residual = 0.0
    rounding = 0.0
    largest = 0.0
    limits = []
    for number, place in enumerate(record.feed.places):
        g = float(record.norms[place] * record.factors[number])
        if number >= record.warm_up:
            for _ in record.feed.steps_of(number):
                if g and not record.drains(place) and number < falls_until:
                    largest = max(g, math.sqrt(s) * largest)
                rounding += ROUNDINGS * record.unit() * (g + residual)
                residual = s * (residual + g)
        limits.append(NOMINAL * residual + UNEVEN * relative * largest + rounding)
    return torch.tensor(limits, dtype=torch.float64)


def _require_sums(record: LongRecord, found: Found) -> bool:
    """Require the sum of all results so far to be the sum of all means, but for residuals."""
    limits = residual_bounds(record)
    after = slice(record.warm_up, None)
    for index in record.indices:
        right = record.wanted(index)
        for rank, rows in record.different_ranks(index):
            if not _require_finite(record, rank, index, rows, found):
                return False
            off = (rows - right)[after].cumsum(0).norm(dim=1)
            wrong = torch.zeros(record.feed.rounds, dtype=torch.bool)
            wrong[after] = off > limits[after]
            found.checked(rows.numel(), float((off / limits[after]).max()))
            if not wrong.any():
                continue
            number = int(wrong.nonzero()[0])
            place = record.place(rank, number, index)
            place += f" (step {number - record.warm_up} after the warm-up)" * bool(record.warm_up)
            return found.require(
                False,
                f"results that sum to the means, within {float(limits[number]):.3g}, the largest "
                "sum of residuals",
                f"{place}: the sum of all results so far is off by "
                f"{float(off[number - record.warm_up]):.3g}; at the end by {float(off[-1]):.3g}, "
                f"with a limit of {float(limits[-1]):.3g}",
                _loss(rows[after], right[after]),
            )
    return True


def _loss(rows: torch.Tensor, right: torch.Tensor) -> str:
    """Return how results are lost, in words."""
    total = rows.sum(0)
    wanted = right.sum(0)
    ratio = float(total @ wanted) / max(float(wanted.square().sum()), 1e-300)
    errors = (rows - right).cumsum(0).norm(dim=1)
    jumps = errors[1:] - errors[:-1]
    step = int(jumps.abs().argmax()) + 1
    words = f"over the whole run results are {ratio:.4g} times the means"
    if float(jumps.abs().max()) > 0.5 * float(errors.max()):
        words += f"; most is lost in step {step} after the warm-up"
    return words


def estimate_bounds(record: LongRecord) -> torch.Tensor:
    """Return the limit of the distance from the mean in each round, for EF21."""
    s = math.sqrt(1 - record.claims.delta)
    inputs = [
        torch.cat([record.inputs(rank, index) for index in record.indices], dim=1)
        for rank in range(record.run.world)
    ]
    changes: dict[tuple[int, int], float] = {}
    apart = 0.0
    rounding = 0.0
    limits = []
    before: int | None = None
    for number, place in enumerate(record.feed.places):
        if number < record.warm_up:
            limits.append(math.inf)
            continue
        if before is None:
            apart = float(record.norms[place])
        elif before != place:
            key = before, place
            if key not in changes:
                norms = [float((rows[place] - rows[before]).norm()) for rows in inputs]
                changes[key] = sum(norms) / len(norms)
            apart += changes[key]
        before = place
        limit = 0.0
        for _ in record.feed.steps_of(number):
            # The estimates keep the roundings of all steps.
            rounding += ROUNDINGS * record.unit() * (float(record.norms[place]) + apart)
            apart *= s
            limit += NOMINAL * apart + rounding
        limits.append(limit)
    return torch.tensor(limits, dtype=torch.float64)


def _require_near(record: LongRecord, limits: torch.Tensor, found: Found) -> bool:
    """Require each round's results after the warm-up to be within a distance of the mean."""
    wrong = torch.zeros(record.feed.rounds, dtype=torch.bool)
    squares: dict[int, torch.Tensor] = {}
    for index in record.indices:
        right = record.means[index][record.places] * record.counts.unsqueeze(1)
        for rank in range(record.run.world):
            rows = record.results(rank, index)
            assert rows is not None
            if not _require_finite(record, rank, index, rows, found):
                return False
            squares[rank] = squares.get(rank, 0) + (rows - right).square().sum(1)
            found.checked(rows.numel())
    for rank, total in squares.items():
        off = total.sqrt()
        wrong = off > limits
        wrong[: record.warm_up] = False
        if wrong.any():
            number = int(wrong.nonzero()[0])
            return found.require(
                False,
                f"a result within {float(limits[number]):.3g} of the mean",
                f"{record.place(rank, number)}: {float(off[number]):.3g} away",
                pattern(wrong, record),
            )
        shares = (off / limits.clamp(min=1e-300))[record.warm_up :]
        found.checked(1, float(shares[limits[record.warm_up :] > 0].max()))
    return True


def _require_finite(
    record: LongRecord, rank: int, index: int, rows: torch.Tensor, found: Found
) -> bool:
    """Require finite results after the warm-up, since all gradients are finite there."""
    broken = ~rows.isfinite().all(1)
    broken[: record.warm_up] = False
    if not broken.any():
        return True
    number = int(broken.nonzero()[0])
    return found.require(
        False,
        "finite values for finite gradients",
        f"{record.place(rank, number, index)}: some are not, or there is no gradient",
        pattern(broken, record),
    )
