"""Judge lossy results, which are compressed, random or local: no single step is right or wrong.

Let x_r be the gradient that rank r feeds, m the mean over the group and y the result. The following
must hold for each parameter, in float64, over the steps after the warm-up:

    compressed          sum(y) = sum(m) once faint gradients have been fed long enough: the residual
                        is empty
    compressed(ef21)    y = m once the same gradient has been fed long enough
    compressed(False)   ||y - m|| <= sqrt(1 - delta) mean_r ||x_r||, per bucket and step
    unbiased            the same gradient is fed N = 96 times; for six directions u, with
                        d_t = <y_t - m, u>,
                        |sum_t d_t| <= 6 sqrt(sum_t d_t**2) + 12 max_t |d_t|
    local               y = sum_q w_q x_q with w >= 0, the same w for every element of a bucket,
                        each rank's own w above zero; w sums to 1 on each rank, and over the ranks
                        of a group to 1 for each q
    all but local       y has the same bits on all ranks of a group, in every step

Long enough. A compressor with ``delta`` keeps at most (1 - delta)**(1/2) of its input. After n
steps without new gradients at most (1 - delta)**(n/2) of the residual is left; n makes that 1/256,
1/1024 where DDP is made anew, or 1/128 in scenarios that repeat the requirement: under an option of
DDP, on other groups and nodes, for other parameters, or after a load. A residual is seldom larger
than a few gradients. The rest is therefore below 1/32 of the gradients, or a few times that if the
rest becomes uneven and signs keep less of it than they claim. The limit is 1/16. A wrong divisor,
group or residual is off by a quarter or more.

Faint gradients. A hook may send nothing of a parameter whose gradient is zero on all ranks, and
keep the residual until an expert is used again. Residuals are therefore emptied by gradients of
2**-20 of the others, and not by zeros. With them e <- (1 - delta)**(1/2) (e + x) ends at a residual
of at most 2/delta 2**-20 gradients: 2**-15 for the default delta. They are part of the means.

Slow compressors. No compressor of signs has a delta that is much above 1/n for n elements of a
bucket with heavy tails or an outlier: it sends s sign(e) with s = ||e||_1 / n, and so at least the
n-th part of each element in each step. The residuals of ordinary gradients become such values too,
in a few of a hundred runs: once most elements are sent, a few are left. A sum may therefore be off,
if all elements of at least half the largest missing value still come out: by a 4n-th part of it a
step, on average over the last half of the faint steps. The factor 4 is for ranks whose residuals
have the other sign. A value that was lost does not come out at all, or as slowly as the faint
gradients; over all faint steps, the part of it that was not lost would. In ``layers`` the sum may
be off by any share; elsewhere it stays below 1/4. Signs with one scale, and with one for either
sign, left 0.147 at most in 13,500 simulated runs of these scenarios' gradients, with 40 to 5,000
elements and three numbers of faint steps. Of 1,500 others, whose scales differed by up to 2**12,
240 were off, and 234 of these came out in the last half.

Dropped results. With find_unused_parameters, DDP drops the result of a parameter that no rank has
used in a step. A hook without a collective of its own cannot know that, and sends its residual
there. Its results are therefore judged as the hook returned them, dropped ones included. A hook
that returns nothing for such a parameter, and keeps its residual, has the same sum.

Unbiased. sum_t d_t / sqrt(sum_t d_t**2) is self-normalized: for errors that are symmetric given the
past it exceeds 6 with probability at most 2 exp(-6**2 / 2) < 4e-8 (Efron, JASA 1969). Errors that
are seldom and large are not symmetric: if L of them are expected and K of size R come, then
|K - L| R is to be at most 6 sqrt(K) R + 12 R. For L from 18 on this fails with probability below
1e-7 (Poisson). Directions are therefore taken over many random elements: over all parameters
together, and over each parameter of at least 256 elements. Smaller parameters are judged only if
the results are near the mean in each draw (a relative error of at most 1/4), or if the parameter
has 28 elements and 100 results other than zero, so that L is large enough; a bias of up to a
twentieth of a typical element is then left to the larger ones. With at most 60 directions in a run
the probability of a false failure is below 1e-5 before any run is seen. A hook draws the same
numbers in every run (rule 3.3), so that a verdict does not vary. A bias of twice the errors'
deviation along a direction is found, and so is a bias without any deviation.

A parameter, however small, that has the same values in all draws, not all zero, must be the mean up
to a quarter, if elements change from draw to draw in at least 2 * 1/5 * 4/5 of all cases. That is
the rate of elements one of whose two values has a probability of 1/5. A value that would compensate
for the constant ones, if it is drawn as often, stays out of 96 draws with a probability below
(4/5)**96 < 1e-9. If draws change less often this is not required: a correction may be seldom.

Never sent. Let all ranks feed an element with the same sign, and let the elements whose gradients
are no larger (by their mean magnitude) be other than zero in a third of the draws. A compressor
that rounds to levels, or selects at random, sends larger elements no more seldom. If W ranks send
one with probabilities whose sum is s, then it is other than zero with at least 1 - exp(-s), while
others of that size have at most s: it is with at least 0.63 / 3, and zero in all of 95 draws with a
probability below 2e-10. Elements on which ranks disagree may cancel out, and are not judged.

Outliers. If one element is nine tenths of a parameter's norm or more, a hook with few levels sends
the other elements so seldom that L is below 18. Only the outlier itself is then judged, and only if
results change from draw to draw as often as required above: its average is right up to the bound
above, and off by at most a quarter if it varies by less than a quarter. Both may be a twentieth
more: another rank's element at that place is a ten-thousandth of it.

Beside large ones. Rounding with too few random bits never sends elements below their resolution:
with one random byte, those whose distance from a level is below a 256th of a step. ``buckets``
feeds 20,475 elements that are 2**-4 to 2**-15 of the largest, the same ones 96 times, and as many
above x as there are below 1/x. So an octave adds up to 0.4 of the largest element. If a
compressor has no more than two levels, zero and the largest element, L is 37 for each octave, and
more with finer levels; if the upper one is the norm of the bucket on four ranks, L is 20. The
errors of an octave are judged along its signs by the bound above. Octaves are joined until there
are 256 elements, so that L is large enough for random selections. With two levels the loss of a
whole octave is found, and with 127 levels that of a twelfth.

Dust. 63,881 of 65,519 elements have one size x, 2**-15 to 2**-19 (``scenarios/dust.py``), and the
others a deviation of 1/4. The errors of all of them are judged along their signs by the same bound,
and so are those of the positive ones, of every other one and of the first half. The others' sum is
330, and their norm 10. A selection with probabilities in proportion to sizes that sends k elements
sends k/150 of these at 2**-15, and k/2400 at 2**-19. With two levels and the norm of the bucket L
is 67 in 160 draws on two ranks at 2**-15, and 4 at 2**-19. If no dust is sent, it is judged only if
36 elements are to be expected, by the rate and the size of the others. What is always lost, or too
short by a share, has errors of one sign: 160 equal ones exceed 6 sqrt(160) + 12.

A second bucket of the same form is bfloat16 or float16 (u = 2**-9 or 2**-11), and its dust 2**-13
to 2**-10, or 2**-15 to 2**-13. Its results may be off by 16 u of the largest element, up as often
as down: by 8 or 2 in the sum over all elements, which is 8 to 62 or 2 to 8. With rows of 256 an
element of 2**-10 has a probability of about 2**-9.3. A coin of 8 bits takes that for 2**-8, so that
the sum is 2.5 times as large.

Rows. A rank uses about 30 rows of the large embedding and three of each small one, others in each
step; only elements that a rank has used are judged, along the mean of each step, its signs and
ones. If rows are left out with probability 1/2 and not doubled, 160 errors along the mean have the
expectation -1/2 and a deviation of about 1/10. Their sum of 80 exceeds 6 sqrt(160) / 2 + 12 * 0.9.
The rows of a parameter, or of all embeddings, are judged if 100 of them are sent, or if results are
near the mean. If a third of the elements of dense parameters are sent, one row of 4,000 has to be:
a right hook that selects a hundredth of the rows sends none with a probability of e**-40.

Draws. Let e_t be the error of draw t. Given the draws before it has the expectation zero, so that
<e_t, e_(t+k)> has it too, for every lag k. The bound above holds for their sum over t. Noise that
repeats after k steps has positive products only: N of about the same size exceed 6 sqrt(N) + 12
from N = 58 on. ``values`` feeds 160 draws, so that lags up to 80 are judged, and so that noise that
is used twice, with 80 products, is found. If a share s of the squares is in common and n
elements are independent, each product is s +- 1/sqrt(n) of the square, and s = 1/10 is found in
parameters of a thousand elements. Products that are negative (antithetic draws) do no harm.

Scales. ``delta`` is a property of a compressor and of its input, which is the bucket. A scale or a
selection that a bucket shares is therefore no mistake, although layers whose gradients are 1e6
times smaller than those of others in their bucket then come out late, and without feedback never.
Layers of different scales are fed in buckets of their own, where only absolute numbers, and state
that buckets share, can lose them. In the first step DDP has one bucket for all layers: it is fed
zeros.

Few elements. Without feedback some gradients lie in few elements, so that each of them is more of
the squared norm than the 1 - delta that may be lost: the last and the first elements of a bucket
and of its parameters, those at the borders of blocks, and drawn ones (``scenarios/
few_elements.py``). With feedback they are fed in ``layers``, where their norm is that of the other
gradients, and their sum must come out like that of the others. A bound that holds for every input,
as that of a delta-compressor does, holds for them too.

Small gradients. All bounds are relative to the gradients, so that they hold for gradients a
thousandth as large, too. Most gradients of a model are below 1; a threshold or an epsilon that is
an absolute number shows only there (13.10).

Local. A bucket has far more elements than there are ranks, and they are independent: the weights
are the solution of least squares, and exact up to rounding. A bucket of fewer than 4 elements a
rank that are not zero on all ranks proves only that each element lies between the smallest and the
largest gradient, and so does a bucket if a rank feeds none of its parameters. The weights are
P r for the pseudoinverse P of the gradients and the results r. Errors of r are independent and at
most a few roundings e, so that a weight moves by no more than |P_j e|. If that exceeds 1/1000, as
in a small bucket of bfloat16, weights must exist, and are not judged.

Mixing. A link joins two ranks if one has a weight in a result of the other. Over a run of 24 steps,
without the first, the links of each parameter must connect all ranks of a group. Partners that are
drawn at random in every step leave four ranks apart in 23 steps with probability 3**-22.
"""

from collections.abc import Sequence
from itertools import product

import torch

from conformance.judging.oracles.lossy import compression, local, repeats
from conformance.judging.oracles.lossy import unbiased as random_results
from conformance.judging.oracles.lossy.common import (
    LIMIT,
    ROUNDINGS,
    JudgedRun,
    joined,
    unit_roundoff,
)
from conformance.judging.oracles.lossy.noise import (
    require_noise,
    require_noise_of_all,
    require_noise_of_group,
    require_noise_of_parameter,
)
from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.evidence import SPECIAL_FIRST
from conformance.scenarios.specials import OVERFLOWS, place_of
from conformance.subjects.claims import (
    CONTRACTION,
    DIFFERENCE,
    FEEDBACK,
    LOCAL,
    UNBIASED,
    Claims,
)

LEFT = 1 / 256  # of a residual, once faint gradients have been fed long enough
LEFT_IN_REPEATED = 1 / 128  # the same in REPEATED_SCENARIOS
LEFT_IN_REWRAPPED = 1 / 1024  # the same where DDP is made anew: signs with one scale take longer
TRIALS = 96  # draws on the same gradients
TRIALS_OF_VALUES = 160  # the same in ``values``, see "Draws", and in ``sparse``, see "Rows"
MIXING_STEPS = 24  # of a local result, see "Mixing"

# Scenarios that repeat the requirement under an option of DDP, or in another model.
OPTION_SCENARIOS = (
    "accumulated",
    "autocast",
    "combined",
    "frozen",
    "joint_alike",
    "rewrapped",
    "sizes",
    "static",
    "two_models",
    "uneven",
    "unused",
    "unused_groups",
)

# Scenarios that repeat the requirement elsewhere: residuals need not become as small again.
REPEATED_SCENARIOS = (
    *(name for name in OPTION_SCENARIOS if name != "rewrapped"),
    "subgroups",
    "unequal_nodes",
    "equal_nodes",
    "uneven_groups",
    "two_groups",
    "equal_groups",
    "joint",
    "default_dtypes",
    "complex",
    "sparse",
    "buckets",
    "dtypes",
    "shapes",
    "saved",
    "resumed",
    "network",
)

# The scenarios in which lossy results are judged over many steps; the others stay short.
LONG_SCENARIOS = (
    "values",
    "small",
    "layers",
    "middle_sizes",
    "rewrapped",
    *REPEATED_SCENARIOS,
)

# Scenarios of many buckets, which take long: lossy subjects run them at one world size, while exact
# results are cheap to judge at several.
ONE_WORLD_SCENARIOS = ("dtypes", "shapes", "layers")

__all__ = [
    "LEFT",
    "LEFT_IN_REPEATED",
    "LEFT_IN_REWRAPPED",
    "LIMIT",
    "LONG_SCENARIOS",
    "MIXING_STEPS",
    "ONE_WORLD_SCENARIOS",
    "OPTION_SCENARIOS",
    "REPEATED_SCENARIOS",
    "ROUNDINGS",
    "TRIALS",
    "TRIALS_OF_VALUES",
    "connects_all",
    "differs",
    "require",
    "require_dust",
    "require_finite",
    "require_fresh_draws",
    "require_mixing",
    "require_noise",
    "require_noise_of_all",
    "require_noise_of_group",
    "require_noise_of_parameter",
    "require_other_numbers",
    "require_period",
    "require_recovered",
    "require_same_bits",
    "require_seen",
    "require_small_elements",
    "variance",
    "whole_result",
]


def require(run: Run, claims: Claims, found: Found) -> None:
    """Require the claim of all steps after the warm-up; report the first violation.

    Of the scenario ``values``, rule 3.1 compares the ranks.
    """
    judged = JudgedRun(run, claims, found)
    steps = range(claims.warmup, len(run.scenario.steps))
    if claims.lossy == LOCAL:
        local.require_weights(judged, steps)
    elif run.scenario.name == "values":
        _require_values(judged, steps, range(run.world))
    elif require_same_bits(run, claims, found):
        _require_values(judged, steps, judged.without_equals())


def _require_values(judged: JudgedRun, steps: range, ranks: Sequence[int]) -> None:
    lossy = judged.claims.lossy
    if lossy == CONTRACTION:
        compression.require_contraction(judged, steps)
    elif judged.run.scenario.name not in LONG_SCENARIOS:
        compression.require_size(judged, steps)
    elif lossy == FEEDBACK:
        compression.require_sum_of_means(judged, steps, ranks)
    elif lossy == DIFFERENCE:
        compression.require_convergence(judged, steps[-1], ranks)
    elif lossy == UNBIASED:
        random_results.require_expectation(judged, steps)


def require_same_bits(run: Run, claims: Claims, found: Found) -> bool:
    """Require the same bits on all ranks of a group that get a gradient; return whether it holds.

    Non-finite values are compared as bits, too.
    """
    judged = JudgedRun(run, claims, found)
    for step, index in product(range(len(run.scenario.steps)), range(len(run.scenario.params))):
        name = f"{step}/grad/{run.parameter_name(index)}"
        for group in {judged.group(rank) for rank in range(run.world)}:
            having = [rank for rank in group if name in run.ranks[rank].tensors]
            for rank in having[1:]:
                one = run.ranks[having[0]].tensors[name]
                other = run.ranks[rank].tensors[name]
                place = f"step {step}, parameter {run.parameter_name(index)}"
                if not found.require(
                    _same_bits(one, other),
                    "the same bits on all ranks of a group",
                    f"ranks {having[0]} and {rank} differ in {place}",
                ):
                    return False
    return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    views = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*views)


def require_small_elements(run: Run, claims: Claims, found: Found) -> None:
    """Require small elements beside large ones to be right on average, see "Beside large ones"."""
    steps = range(claims.warmup, len(run.scenario.steps))
    random_results.require_small_elements(JudgedRun(run, claims, found), steps)


def require_dust(run: Run, claims: Claims, found: Found) -> None:
    """Require the elements of ``scenarios/dust.py`` to be right on average, see "Dust"."""
    steps = range(claims.warmup, len(run.scenario.steps))
    random_results.require_dust(JudgedRun(run, claims, found), steps)


def require_fresh_draws(run: Run, claims: Claims, found: Found) -> None:
    """Require that no draw has anything in common with a later one, see "Draws" above."""
    steps = range(claims.warmup, len(run.scenario.steps))
    random_results.require_fresh_draws(JudgedRun(run, claims, found), steps)


def require_other_numbers(run: Run, claims: Claims, found: Found) -> None:
    """Require that no random number of a step is used twice, see ``repeats.py``."""
    steps = range(claims.warmup, len(run.scenario.steps))
    repeats.require_other_numbers(JudgedRun(run, claims, found), steps)


def require_mixing(run: Run, claims: Claims, found: Found, first: int = 0) -> None:
    """Require the gradients of all ranks to meet from a step on, see "Mixing" above.

    In the first step a single bucket holds all parameters: it does not count.
    """
    steps = range(max(1, first, claims.warmup), len(run.scenario.steps))
    local.require_mixing(JudgedRun(run, claims, found), steps)


def connects_all(run: Run, claims: Claims) -> bool:
    """Return whether the gradients of all ranks of a local run meet, as rule 13.11 requires."""
    found = Found()
    require_mixing(run, claims, found)
    return not found.failures


def require_period(run: Run, claims: Claims, found: Found, first: int = 0) -> None:
    """Require the mean over all ranks once in every period, from a step on."""
    steps = range(max(first, claims.warmup), len(run.scenario.steps))
    local.require_period(JudgedRun(run, claims, found), steps, claims.period)


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


def require_recovered(run: Run, claims: Claims, found: Found) -> None:
    """Require the claim of the steps after those with NaN and infinities, the last one of which is
    ordinary; ``lossy_steps.show_recovery`` has the steps after it.

    In ``special_first`` compression with feedback has a sum to keep: that of the steps after the
    last overflow. All steps before are a thousandth as large, and so is the residual then.
    """
    judged = JudgedRun(run, claims, found)
    if claims.lossy == FEEDBACK and run.scenario.name == SPECIAL_FIRST.name:
        after_overflows = range(run.steps(*OVERFLOWS)[-1] + 1, len(run.scenario.steps))
        compression.require_sum_of_means(judged, after_overflows)
        return
    ordinary = run.steps("crafted")[-1]
    later = range(ordinary + 1, len(run.scenario.steps))
    if claims.lossy == CONTRACTION:
        compression.require_contraction(judged, range(ordinary, ordinary + 1))
    elif claims.lossy == FEEDBACK:
        compression.require_drained(judged, later)
    elif claims.lossy == DIFFERENCE:
        compression.require_convergence(judged, later[-1])
    elif claims.lossy == UNBIASED:
        random_results.require_expectation(judged, later)


def require_seen(run: Run, claims: Claims, found: Found, steps: list[int]) -> None:
    """Require non-finite gradients in ``steps`` to show on every rank.

    A rank of a ``local`` subject may miss those of others, but not its own. A compressor may leave
    out the few of a step that names no place. Then the result is zero at all of their places.
    """
    indices = range(len(run.scenario.params))
    for step, rank in product(steps, range(run.world)):
        own = (run.fed(rank, step, index) for index in indices)
        if claims.lossy == LOCAL and all(fed.isfinite().all() for fed in own):
            continue
        results = [run.got(rank, step, index) for index in indices]
        seen = any(got is not None and not got.isfinite().all() for got in results)
        if not seen and not place_of(run.scenario.steps[step]) and _left_out(run, rank, step):
            continue
        feeding = [
            other
            for other in run.group(rank)
            if not all(run.fed(other, step, index).isfinite().all() for index in indices)
        ]
        found.require(
            seen,
            "a result that is not finite if a gradient is not",
            f"rank {rank}, step {step}: all are finite",
            f"NaN or infinities of rank {', '.join(map(str, feeding))} are lost",
        )


def _left_out(run: Run, rank: int, step: int) -> bool:
    """Return whether a result is zero wherever a rank of the group fed a value that is not finite,
    and not zero everywhere."""
    others = 0
    for index in range(len(run.scenario.params)):
        got = run.got(rank, step, index)
        fed = torch.stack([run.fed(other, step, index) for other in run.group(rank)])
        special = ~fed.isfinite().all(0)
        if got is None or got.shape != special.shape or got[special].any():
            return False
        others += int(got[~special].count_nonzero())
    return others > 0


def whole_result(run: Run, rank: int, step: int) -> torch.Tensor | None:
    """Return the results of all parameters in one vector, or None if one is missing."""
    return joined([run.got(rank, step, index) for index in range(len(run.scenario.params))])


def differs(run: Run, step: int, claims: Claims) -> bool:
    """Return whether a result of ``step`` is further from the mean than rounding explains."""
    judged = JudgedRun(run, claims, Found())
    for rank, index in product(range(run.world), range(len(run.scenario.params))):
        # State may keep roundings of earlier steps, relative to the gradients of those steps.
        fed = max(judged.fed_norm(rank, [earlier], [index]) for earlier in range(step + 1))
        got = run.got(rank, step, index)
        right = judged.mean(rank, step, index)
        if got is None or (got - right).norm() > ROUNDINGS * unit_roundoff(run, index) * fed:
            return True
    return False


def variance(run: Run, begin: int) -> float:
    """Return the mean square of rank 0's errors from step ``begin`` on."""
    total = 0.0
    for step in range(begin, len(run.scenario.steps)):
        for index in range(len(run.scenario.params)):
            got = run.got(0, step, index)
            right = mean(run, 0, step, index)
            total += float(((torch.zeros_like(right) if got is None else got) - right).norm() ** 2)
    return total
