"""The messages of section 13, on runs written by hand."""

from collections.abc import Callable
from dataclasses import replace

import expecttest
import torch

from conformance.judging.oracles import lossy
from conformance.judging.oracles.lossy import compression, likeness, local, unbiased
from conformance.judging.oracles.lossy.common import JudgedRun
from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Found, Verdict
from conformance.records.run import Run
from conformance.scenarios.hook import SPECIAL, VALUES
from conformance.scenarios.model import Param, Scenario
from conformance.subjects.claims import parse_claims
from tests.made_runs import Result, made_run, read_failures

WIDE = replace(VALUES, params=(Param((40, 50)),), steps=("constant",) * 160)
LAYER = replace(WIDE, params=(Param((40, 50)),) * 3, steps=("training_constant",) * 160)
PAIR = replace(WIDE, params=(Param((40, 50)), Param((1,))))
NORMAL = replace(VALUES, steps=("normal",) * 6)
WITHOUT_FEEDBACK = "compressed(feedback=False, delta=0.5)"
Judge = Callable[[JudgedRun, range], object]


def judged(
    judge: Judge, result: Result, scenario: Scenario = NORMAL, claims: str = "local", world: int = 2
) -> str:
    """Return the failures of a requirement on a run with these results."""
    run = made_run(result, scenario, world)
    found = Found()
    judge(JudgedRun(run, parse_claims(claims), found), range(len(scenario.steps)))
    return read_failures(found.failures[:1])


def weights(judged: JudgedRun, steps: range) -> None:
    """Require weighted means of the ranks' gradients in the first step."""
    local.require_weights(judged, steps)


def own(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return run.fed(rank, step, index)


def of_first(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return a mean to which the first rank contributes more on all ranks."""
    return 0.75 * run.fed(0, step, index) + 0.25 * run.fed(1, step, index)


def mixed(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the elements of both ranks in turn."""
    is_odd = torch.arange(len(run.fed(0, step, index))) % 2 == 1
    return torch.where(is_odd, run.fed(0, step, index), run.fed(1, step, index))


def other(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return run.fed(1 - rank, step, index)


def larger(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return mean(run, rank, step, index) * 9


def off(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the mean and its largest element a second time."""
    right = mean(run, rank, step, index)
    return right + right.abs().max()


def infinite(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return mean(run, rank, step, index) / 0


def repeating(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the mean and noise that is drawn again after two steps."""
    generator = torch.Generator().manual_seed(step % 2 + 2 * index)
    right = mean(run, rank, step, index)
    return right + torch.randn(right.shape, generator=generator)


def noisy(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the mean and noise; a constant in its place for parameters of one element."""
    generator = torch.Generator().manual_seed(step)
    right = mean(run, rank, step, index)
    if len(right) == 1:
        return 1.5 * right
    return right.clamp(-200, 200) + torch.randn(right.shape, generator=generator)


def test_weighted_means_are_described() -> None:
    texts = (
        judged(weights, larger),
        judged(weights, mixed),
        judged(weights, other),
        judged(weights, of_first),
    )
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: between the smallest and the largest gradient of the ranks
Actual: rank 0, step 0, bucket 0: 46 of 47 elements lie outside
Expected: the same weights of the ranks' gradients for all elements of a bucket
Actual: rank 0, step 0, bucket 0: 47 of 47 elements do not fit the weights that fit best,
    0.516 of rank 0, 0.416 of rank 1
Expected: weights of at least 0 that sum to 1, this rank's own among them
Actual: rank 0, step 0, bucket 0: 0 of rank 0, 1 of rank 1
Expected: weights of each rank's gradient that add up to 1 over all ranks' results
Actual: step 0, bucket 0: the weights of ranks 0, 1, ... add up to 1.5, 0.5""",
    )


def test_ranks_that_are_apart_are_described() -> None:
    texts = (
        judged(local.require_mixing, own),
        judged(lambda run, steps: local.require_period(run, steps, 2), own),
    )
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: ranks that all exchange gradients within 6 steps, directly or through others
Actual: parameter p0: no gradient passes between the sets of ranks {0}, {1}
Likely cause: nothing is communicated: claim local(ratio=0) if that is meant
Expected: the mean over all ranks in one of 2 steps
Actual: parameter p0: not in the 2 steps up to step 1
Likely cause: a period that is counted in buckets, or never begins""",
    )


def test_a_parameter_that_alone_is_not_communicated_is_described() -> None:
    """The cause is another one than with a hook that communicates nothing."""
    assert local.cause_of_parts([[0], [1]], is_silent=False) == (
        "gradients of other parameters are communicated, and none of this one"
    )


def test_ranks_whose_weights_are_unknown_are_not_judged() -> None:
    """Seven elements do not determine the weights of two ranks."""
    found = Found()
    run = made_run(own, replace(NORMAL, params=(Param((7,)),)), 2)
    local.require_mixing(JudgedRun(run, parse_claims("local"), found), range(6))
    assert found.verdict() is Verdict.NOT_RUN
    assert found.without_evidence == (
        "the weights of ranks are unknown in all buckets: they are too small, or too coarsely "
        "rounded"
    )


def test_compressed_results_are_described() -> None:
    texts = (
        judged(compression.require_sum_of_means, own, claims="compressed"),
        judged(
            lambda run, steps: compression.require_convergence(run, steps[-1]),
            off,
            claims="compressed(feedback=ef21)",
        ),
        judged(
            compression.require_contraction, off, claims="compressed(feedback=False, delta=0.5)"
        ),
        judged(compression.require_size, lambda *of: 1000 * off(*of), claims="compressed"),
        judged(compression.require_size, infinite, claims="compressed"),
    )
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: results that add up to the sum of the means, within 0.0625 of the norm of the
    gradients, over 6 steps and 0 more with gradients near zero, in which residuals come
    out
Actual: rank 0, parameter p0: the sum of the results is off by 0.775 of the norm of the
    gradients
Likely cause: equal to this rank's own gradients: nothing was communicated, or its
    residual is taken against the values that it received
Expected: the mean, within 0.0625, of gradients that were fed again and again
Actual: rank 0, parameter p0: off by 2.34
Likely cause: the result is -0.002 times the mean plus a part orthogonal to it
Expected: ||result - mean|| <= sqrt(1 - 0.5) ||gradient|| = 4.87
Actual: rank 0, step 0, bucket 0: 12
Expected: results of a norm of at most 150
Actual: rank 0, parameter p0: 2.92e+04
Expected: finite values for finite gradients
Actual: rank 0, step 0, parameter p0: some are not""",
    )


def test_random_results_are_described() -> None:
    texts = (
        judged(unbiased.require_expectation, off, WIDE, "unbiased"),
        judged(unbiased.require_expectation, noisy, LAYER, "unbiased"),
        judged(unbiased.require_expectation, noisy, PAIR, "unbiased"),
        judged(
            unbiased.require_expectation, lambda *of: off(*of) + repeating(*of), WIDE, "unbiased"
        ),
        judged(unbiased.require_fresh_draws, repeating, WIDE, "unbiased"),
    )
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: errors that cancel out: a sum of at most 316 over 160 draws, along one direction
Actual: rank 0, all parameters: a sum of 575; the average result is off by 0.114 of the
    norm of the mean
Likely cause: the result is 1.1 times the mean plus a part orthogonal to it
Expected: an element of -6338 beside small ones, on average, within 1.9e+03
Actual: rank 0, parameter p2, element 96: -200.1 on average of 160 draws
Likely cause: a range that is cut, or values that are clamped
Expected: the mean, if results do not vary
Actual: rank 0, parameter p1: the same 0.5 off in each of 160 draws
Expected: errors that cancel out: a sum of at most 3.03e+03 over 160 draws, along one
    direction
Actual: rank 0, all parameters: a sum of 5.5e+03; the average result is off by 1.09 of the
    norm of the mean
Likely cause: the result is 2.1 times the mean plus a part orthogonal to it
Expected: errors that are not correlated with those of 2 steps later
Actual: rank 0, all parameters: a correlation of 0.988
Likely cause: the random numbers repeat after 2 steps, as from a seed that comes again""",
    )


def test_missing_results_are_described() -> None:
    run = made_run(scenario=NORMAL)
    for rank in run.ranks:
        del rank.tensors["1/grad/p0"]
    found = Found()
    compressed = JudgedRun(run, parse_claims(WITHOUT_FEEDBACK), found)
    compression.require_contraction(compressed, range(6))
    compression.require_size(compressed, range(6))
    lossy.require_finite(run, found, [1])
    lossy.require_finite(made_run(infinite, NORMAL), found, [1])
    likeness.require_near_reference({"values@2": run, "reference@2": run}, 0, 1, found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: a gradient
Actual: rank 0, step 1, bucket 0: a parameter has none
Expected: a gradient
Actual: rank 0, step 1, parameter p0: none
Expected: finite values for finite gradients
Actual: rank 0, step 1, parameter p0: no gradient
Likely cause: a division by zero, or state that keeps a NaN or an infinity of an earlier
    step
Expected: finite values for finite gradients
Actual: rank 0, step 1, parameter p0: 15 elements are not
Likely cause: a division by zero, or state that keeps a NaN or an infinity of an earlier
    step
Expected: a gradient
Actual: rank 0, step 1: a parameter has none""",
    )


def test_special_values_and_noise_are_described() -> None:
    found = Found()
    scenario = replace(SPECIAL, steps=("crafted", "nan/1/all", *SPECIAL.steps[2:]))
    finite = made_run(lambda run, r, s, i: mean(run, r, s, i).nan_to_num(0, 0, 0), scenario)
    claims = parse_claims("unbiased(noise=0.5)")
    lossy.require_seen(finite, claims, found, finite.steps("nan"))
    lossy.require_noise(finite, claims, found, finite.steps("zero_all"))
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: a result that is not finite if a gradient is not
Actual: rank 0, step 1: all are finite
Likely cause: NaN or infinities of rank 1 are lost
Expected: a result that is not finite if a gradient is not
Actual: rank 1, step 1: all are finite
Likely cause: NaN or infinities of rank 1 are lost
Expected: noise with a root mean square of 0.236 to 0.75 if zeros are fed
Actual: rank 0, step 4: 0""",
    )


def test_a_compressor_may_leave_out_a_few_special_values() -> None:
    """Then they are zero; a result that has other ranks' values at their places has lost them."""
    claims = parse_claims("compressed")

    def seen(result: Callable[[Run, int, int, int], torch.Tensor]) -> bool:
        found = Found()
        run = made_run(result, SPECIAL)
        lossy.require_seen(run, claims, found, run.steps("nan"))
        return not found.failures

    def left_out(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index).nan_to_num(0, 0, 0)

    def lost(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index).nan_to_num(1, 0, 0)

    assert seen(mean)
    assert seen(left_out)
    assert not seen(lost)
    assert not seen(lambda *place: torch.zeros_like(mean(*place)))


def test_differences_from_a_reference_are_described() -> None:
    found = Found()
    runs = {"values@2": made_run(off, NORMAL), "reference@2": made_run(scenario=NORMAL)}
    likeness.require_near_reference(runs, 0, 1, found)
    lengths = torch.tensor([[9.0, 1.0], [2.0, 1.0], [2.5, 1.0]])
    likeness.require_lengths(0, "normal", lengths, found)
    likeness.require_lengths(0, "normal", lengths.flip(1), found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: a result within 0.0168 of the reference's
Actual: rank 0, step 1: 7.88 away
Expected: results of normal gradients 2 to 2.5 long, as the reference's, or 1.04 more or
    less
Actual: rank 0: 9
Expected: results of normal gradients 2 to 2.5 from the mean, as the reference's, or 1.04
    more or less
Actual: rank 0: 9""",
    )
