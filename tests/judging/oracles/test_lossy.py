"""Section 13 solves for the weights of local results, here on made values."""

from dataclasses import replace

import torch

from conformance.judging.oracles import lossy
from conformance.judging.oracles.lossy import compression
from conformance.judging.oracles.lossy.common import ROUNDINGS, JudgedRun
from conformance.judging.oracles.lossy.local import connected, solve, uncertainty
from conformance.judging.oracles.mean import mean
from conformance.judging.oracles.weights import WEIGHT_SLACK
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.draws import drawn
from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import Param
from conformance.scenarios.values import LAYERS
from conformance.subjects.claims import parse_claims
from tests.made_runs import Result, made_run


def test_weights_are_solved_to_the_last_bits_of_float64() -> None:
    """The bound on local results has no room for errors of the solver.

    One solution alone is off by 13 to 300 units in the last place.
    """
    generator = torch.Generator().manual_seed(0)
    for size, world in ((60, 2), (779, 3), (5000, 3), (20_025, 4)):
        for _ in range(10):
            fed = _crafted(size, world, generator)
            weights = torch.rand(world, generator=generator, dtype=torch.float64)
            got = fed @ (weights / weights.sum())
            units = 2.0**-53 * fed.abs().sum(1)
            off = (got - fed @ solve(fed, got)).abs() / units
            assert float(off.max()) <= ROUNDINGS / 4


def test_rounding_moves_a_solved_weight_by_no_more_than_is_allowed_for_it() -> None:
    generator = torch.Generator().manual_seed(1)
    unknown = dict.fromkeys((16, 40, 4000), 0)
    for size in unknown:
        for _ in range(100):
            fed = torch.randn(size, 3, generator=generator).bfloat16().double()
            got = (fed @ torch.full((3,), 1 / 3, dtype=torch.float64)).bfloat16().double()
            allowed = uncertainty(fed, ROUNDINGS * 2**-9 * fed.abs().sum(1))
            assert float((solve(fed, got) - 1 / 3).abs().max()) <= allowed
            unknown[size] += allowed > WEIGHT_SLACK
    assert unknown == {16: 100, 40: 100, 4000: 0}


def _crafted(size: int, world: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``[size, world]`` small integers of either sign, with one exponent per element."""
    integers = torch.randint(1, 8, (size, world), generator=generator)
    exponents = torch.randint(-3, 4, (size, 1), generator=generator)
    signs = torch.randint(0, 2, (size, world), generator=generator) * 2 - 1
    return (integers * 2.0**exponents).double() * signs


def test_layers_cover_the_scales_of_training_for_any_seed() -> None:
    for seed in range(20):
        exponents = [spec.exponent for spec in drawn(LAYERS, seed).params]
        assert max(exponents) - min(exponents) >= 36
        assert min(exponents) >= -25
        # Both parameters of a pattern have scales from different ranges.
        assert all(abs(exponents[i] - exponents[i + 5]) > 5 for i in range(5))


def test_ranks_that_never_meet_are_apart() -> None:
    pairs = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)) / 2
    assert connected(pairs, (0, 1, 2, 3)) == [[0, 1], [2, 3]]
    ring = torch.eye(4).roll(1, 1)
    assert connected(ring, (0, 1, 2, 3)) == [[0, 1, 2, 3]]


def test_noise_that_repeats_is_no_fresh_draw() -> None:
    scenario = replace(VALUES, steps=("constant",) * 160)
    claims = parse_claims("unbiased")
    for period, holds in ((1000, True), (80, False), (31, False), (8, False)):
        run = made_run(_noisy(period), scenario)
        found = Found()
        lossy.require_fresh_draws(run, claims, found)
        assert bool(found.failures) is not holds, period


def _noisy(period: int) -> Result:
    """Return a function of right results with noise that is drawn again after a period."""

    def result(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        right = mean(run, rank, step, index)
        generator = torch.Generator().manual_seed(1000 * (step % period) + index)
        return right + torch.randn(right.shape, generator=generator)

    return result


def test_other_bits_on_one_rank_are_found() -> None:
    claims = parse_claims("compressed(feedback=False, delta=0.5)")
    found = Found()
    assert lossy.require_same_bits(made_run(), claims, found)
    run = made_run(lambda run, rank, step, index: mean(run, rank, step, index) * (1 + rank * 1e-6))
    assert not lossy.require_same_bits(run, claims, found)


def test_a_value_that_is_lost_does_not_come_out_slowly() -> None:
    """A sum that is off may be explained by a slow compressor, and not by a clamp."""
    claims = parse_claims("compressed(delta=0.25)")
    scenario = drawn(LAYERS, 0)
    scenario = replace(scenario, steps=scenario.steps + ("faint",) * 49)

    def clamped(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        scale = 2.0 ** run.scenario.params[index].exponent
        return mean(run, rank, step, index).clamp(-5 * scale, 5 * scale)

    for result, holds in ((mean, True), (clamped, False)):
        found = Found()
        lossy.require(made_run(result, scenario), claims, found)
        assert bool(found.failures) is not holds


def test_a_slow_compressor_has_lost_nothing() -> None:
    """Signs with one scale need many steps for a few elements that are far above the others."""
    assert not _off("training", _signs())
    assert _off("training", _signs(loses=True))


def test_a_compressor_is_not_slower_than_signs_with_one_scale() -> None:
    """What is left of ordinary gradients is less than a quarter."""
    assert not _off("normal", _signs())
    assert _off("normal", _signs(slower=16))


def _off(kind: str, result: Result) -> bool:
    """Return whether the sum of results is refused, after gradients of a kind and faint ones."""
    kinds = (kind,) * 4 + ("faint",) * 40
    run = made_run(result, replace(VALUES, params=(Param((200,)),), steps=kinds), world=1)
    found = Found()
    judged = JudgedRun(run, parse_claims("compressed(delta=0.25)"), found)
    compression.require_sum_of_means(judged, range(len(kinds)))
    return bool(found.failures)


def _signs(loses: bool = False, slower: float = 1) -> Result:
    """Return a function of signs with one scale and feedback.

    Args:
        loses: it loses large residuals.
        slower: it sends the scale divided by this.
    """
    residual = torch.zeros(200, dtype=torch.float64)

    def result(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        residual.add_(run.fed(rank, step, index))
        sent = residual.sign() * residual.abs().mean() / slower
        residual.sub_(sent)
        if loses:
            residual[residual.abs() > 4 * sent.abs()] = 0
        return sent

    return result
