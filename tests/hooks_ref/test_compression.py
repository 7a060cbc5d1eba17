"""Compressors with their memories, beside their definitions in float64."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.records.run import Run
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import Param
from hooks_ref._state import HookState
from hooks_ref.compression import CompressionState, Compressor
from hooks_ref.sign import OneBit, ScaledSign
from hooks_ref.sparsification import RandomK, TopK
from tests.hooks_ref.algorithms import (
    PARAMS,
    every,
    gradients,
    require_resumes,
    require_same_bits,
    result,
    run_hook,
    scenario,
)

HOOK = "hooks_ref:compression_hook"
STEPS = 12
RATIO = 0.25
UNIT = 2.0**-24


def top_k(x: torch.Tensor, step: int, key: int) -> torch.Tensor:
    """Keep the largest; 12 steps of 4 roundings each must not bridge the gap to the next value."""
    k = math.ceil(RATIO * len(x))
    order = x.abs().argsort(descending=True)
    if k < len(x):
        assert x[order[k - 1]].abs() - x[order[k]].abs() > 100 * UNIT * x.abs().max(), (
            "inputs of this test: a tie"
        )
    kept = torch.zeros_like(x)
    kept[order[:k]] = x[order[:k]]
    return kept


def random_k(x: torch.Tensor, step: int, key: int) -> torch.Tensor:
    places = next(iter(RandomK(RATIO, seed=3)._places([x], [key], step)))
    assert len(set(places.tolist())) == math.ceil(RATIO * len(x))
    # Places count in memory order, and x comes in C order.
    order = lay_out(
        torch.arange(len(x)).view(PARAMS[len(PARAMS) - key].shape), PARAMS[len(PARAMS) - key].layout
    )
    places = torch.as_strided(order, (len(x),), (1,))[places]
    kept = torch.zeros_like(x)
    kept[places] = x[places]
    return kept


def scaled_sign(x: torch.Tensor, step: int, key: int) -> torch.Tensor:
    assert x.abs().min() > 100 * UNIT * x.abs().max(), "inputs of this test: too near to zero"
    return x.abs().mean() * x.sign()


def one_bit(x: torch.Tensor, step: int, key: int) -> torch.Tensor:
    assert x.abs().min() > 100 * UNIT * x.abs().max(), "inputs of this test: too near to zero"
    means = [x[side].mean() if side.any() else torch.zeros(()) for side in (x >= 0, x < 0)]
    return torch.where(x >= 0, means[0], means[1])


Definition = Callable[[torch.Tensor, int, int], torch.Tensor]


def feedback(
    run: Run, index: int, compress: Definition, momentum: float = 0
) -> Iterator[torch.Tensor]:
    """Yield the result of each step: p = x + e, mean of C(p), e = p - C(p)."""
    key = len(PARAMS) - index
    errors = [torch.zeros(1, dtype=torch.float64)] * run.world
    velocities = [torch.zeros(1, dtype=torch.float64)] * run.world
    for step in range(STEPS):
        sent = []
        for rank, x in enumerate(gradients(run, step, index)):
            velocities[rank] = momentum * velocities[rank] + x
            p = errors[rank] + velocities[rank]
            sent.append(compress(p, step, key))
            errors[rank] = p - sent[rank]
            velocities[rank] = velocities[rank].masked_fill(sent[rank] != 0, 0)
        yield torch.stack(sent).mean(0)


def without(run: Run, index: int, compress: Definition) -> Iterator[torch.Tensor]:
    key = len(PARAMS) - index
    for step in range(STEPS):
        yield torch.stack([compress(x, step, key) for x in gradients(run, step, index)]).mean(0)


def ef21(run: Run, index: int, compress: Definition) -> Iterator[torch.Tensor]:
    key = len(PARAMS) - index
    own = [torch.zeros(1, dtype=torch.float64)] * run.world
    for step in range(STEPS):
        own = [
            h + compress(x - h, step, key)
            for h, x in zip(own, gradients(run, step, index), strict=True)
        ]
        yield torch.stack(own).mean(0)


DEFINITIONS: dict[str, Callable[[Run, int], Iterator[torch.Tensor]]] = {
    "top_k": lambda run, index: feedback(run, index, top_k),
    "top_k_dgc": lambda run, index: feedback(run, index, top_k, 0.5),
    "top_k_ef21": lambda run, index: ef21(run, index, top_k),
    "random_k": lambda run, index: feedback(run, index, random_k),
    "random_k_unbiased": lambda run, index: without(
        run, index, lambda x, step, key: random_k(x, step, key) * len(x) / math.ceil(RATIO * len(x))
    ),
    "scaled_sign": lambda run, index: feedback(run, index, scaled_sign),
    "one_bit": lambda run, index: feedback(run, index, one_bit),
}


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rarely), 3])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_each_step_is_what_the_definition_gives(pool: Pool, name: str, world: int) -> None:
    """Several buckets, across the rebuild.

    Tolerance. In units of u M, with u float32's unit roundoff and M the largest |p| of the run:
    each step adds the rounding of at most 4 operations on p and e (x + u, e + p, p - C(p), the
    scale); a scale, a mean of n terms, at most n + 1; the mean over W ranks W + 1. Errors of one
    step are carried to the next: at most (t + 1) (n + W + 6) u M.
    """
    run = run_hook(pool, scenario(STEPS), world, hook=HOOK, state=f"examples.states:{name}")
    for index, spec in enumerate(PARAMS):
        n = math.prod(spec.shape)
        largest = (
            max(float(gradients(run, step, index).abs().max()) for step in range(STEPS)) * STEPS * 2
        )
        for step, expected in enumerate(DEFINITIONS[name](run, index)):
            bound = (step + 1) * (n + world + 6) * UNIT * largest
            for rank in range(world):
                error = (result(run, rank, step, index) - expected).abs().max()
                assert error <= bound, (step, rank, index, float(error), bound)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_all_ranks_hold_the_same_bits(pool: Pool, name: str) -> None:
    run = run_hook(pool, scenario(4, kind="wide"), 3, hook=HOOK, state=f"examples.states:{name}")
    for step, rank, index in every(run):
        assert torch.equal(result(run, rank, step, index), result(run, 0, step, index))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_one_bucket_or_several_is_the_same(pool: Pool, name: str) -> None:
    """Memory belongs to parameters: how DDP groups them changes no bit."""
    one, several = (
        run_hook(pool, scenario(6, bucket_cap_mb=cap), hook=HOOK, state=f"examples.states:{name}")
        for cap in (25.0, 64 / 2**20)
    )
    require_same_bits(one, several)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_resumes_bit_for_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    require_resumes(pool, tmp_path, HOOK, f"examples.states:{name}")


@pytest.mark.parametrize(
    "name",
    [name for name in DEFINITIONS if name not in ("random_k_unbiased", "top_k_ef21", "top_k_dgc")],
)
def test_feedback_telescopes(pool: Pool, name: str) -> None:
    """On exact inputs the results of T steps and the residual of the last one sum to the means.

    The inputs are integers times powers of two, and float32 holds all their partial sums:
    compressors that only select values are exact to the last bit.
    """
    run = run_hook(
        pool, scenario(STEPS, kind="crafted"), hook=HOOK, state=f"examples.states:{name}"
    )
    for index, spec in enumerate(PARAMS):
        fed = torch.stack([gradients(run, step, index).mean(0) for step in range(STEPS)])
        given = torch.stack([result(run, 0, step, index) for step in range(STEPS)])
        residual = fed.sum(0) - given.sum(0)
        # The residual is the mean of the ranks' errors, which a contraction keeps below
        # (1/delta) max|x| for any T.
        delta = 1 / math.prod(spec.shape) if "sign" in name or "bit" in name else RATIO
        assert residual.norm() <= fed.norm(dim=1).max() * 4 / delta
        if "_k" in name:
            assert torch.equal(residual.float().double(), residual)


@pytest.mark.parametrize(
    "compressor",
    [TopK(RATIO), RandomK(RATIO), ScaledSign(), OneBit()],
    ids=lambda c: type(c).__name__,
)
def test_is_a_contraction_and_of_the_size_it_says(compressor: Compressor) -> None:
    for n in (1, 2, 9, 1000):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        encoded = compressor.encode([x], [1], 0, 0)
        decoded = torch.zeros(n)
        compressor.add_decoded(encoded, [decoded], [1], 0)
        delta = {
            TopK: RATIO,
            RandomK: 0.0,
            ScaledSign: float(x.abs().sum() ** 2 / (n * x.norm() ** 2)),
            OneBit: 0.0,
        }[type(compressor)]
        assert (decoded - x).norm() ** 2 <= (1 - delta) * x.norm() ** 2 + 1e-5
        k = math.ceil(RATIO * n)
        packed = -(-n // 8)
        sent = sum(tensor.numel() * tensor.element_size() for tensor in encoded)
        assert (
            sent
            == {TopK: 8 * k, RandomK: 4 * k, ScaledSign: packed + 8, OneBit: packed + 8}[
                type(compressor)
            ]
        )


def test_every_place_is_drawn_equally_often() -> None:
    """RandomK over 4000 steps draws each place with probability 1/4.

    So each of 20 counts is within 1000 +- 194, except with probability below
    2 exp(-2 * 194**2 / 4000) < 2e-8 (Hoeffding).
    """
    compressor = RandomK(RATIO)
    part = torch.zeros(20)
    counts = torch.zeros(20)
    for step in range(4000):
        counts[next(iter(compressor._places([part], [1], step)))] += 1
    assert ((counts - 1000).abs() <= 194).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "compressor", [TopK(RATIO), ScaledSign(), OneBit()], ids=lambda c: type(c).__name__
)
def test_what_is_not_finite_stays_so(compressor: Compressor, value: float) -> None:
    x = torch.ones(16)
    x[5] = value
    decoded = torch.zeros(16)
    compressor.add_decoded(compressor.encode([x], [1], 0, 0), [decoded], [1], 0)
    assert not decoded[5].isfinite()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_goes_on_after_a_step_that_overflowed(pool: Pool, name: str) -> None:
    """Values that are not finite are not remembered; in EF21 all ranks forget the same elements."""
    steps = ("normal",) * 3 + ("nan",) + ("normal",) * 8 + ("inf",) + ("normal",) * 8
    run = run_hook(
        pool, replace(scenario(), steps=steps), hook=HOOK, state=f"examples.states:{name}"
    )
    after = [step for step in range(4, len(steps)) if steps[step] == "normal"]
    for index, step in itertools.product(range(len(PARAMS)), after):
        assert result(run, 0, step, index).isfinite().all(), (index, step)
        assert torch.equal(result(run, 0, step, index), result(run, 1, step, index))


def test_ef21_is_the_mean_of_its_estimates_after_an_overflow(pool: Pool) -> None:
    """Fed the same again and again, it gives the mean itself.

    Values that ranks forgot did not stay in the mean of all.
    """
    steps = ("normal", "nan") + ("zero_all",) * 6
    run = run_hook(
        pool, replace(scenario(), steps=steps), hook=HOOK, state="examples.states:top_k_ef21"
    )
    for index in range(len(PARAMS)):
        # Estimates are at most twice as large as the gradients, and each step rounds the W
        # estimates and their mean at most twice each.
        largest = max(
            float(gradients(run, step, index).nan_to_num(0).abs().max()) for step in (0, 1)
        )
        assert (
            result(run, 0, len(steps) - 1, index).abs().max() <= len(steps) * 6 * UNIT * 2 * largest
        )


@pytest.mark.parametrize("name", ["everything", "everything_at_random"])
def test_half_precision_is_summed_in_full(pool: Pool, name: str) -> None:
    """On both ranks 49,152: the sum is beyond float16, the mean is not."""
    params = (Param((12, 9), dtype="float16"), Param((7,), dtype="float16"))
    setup = f"tests.hooks_ref.compression_subjects:fed_49152,state={name}"
    run = run_hook(pool, scenario(2, params=params), setup=setup)
    assert torch.equal(result(run, 0, 0, 0), torch.full((108,), 49_152.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "compressor",
    [TopK(RATIO), RandomK(RATIO), ScaledSign(), OneBit()],
    ids=lambda c: type(c).__name__,
)
def test_other_dtypes(compressor: Compressor, dtype: torch.dtype) -> None:
    """The magnitudes of 70,000 ones sum to more than float16 holds."""
    x = torch.ones(70_000, dtype=dtype)
    decoded = torch.zeros_like(x)
    compressor.add_decoded(compressor.encode([x], [1], 0, 0), [decoded], [1], 0)
    assert decoded.dtype == dtype
    assert decoded.max() == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TopK(0), r"ratio: a number in \(0, 1\]; got 0"),
        (lambda: TopK(1.5), "ratio"),
        (lambda: RandomK(0.5, seed=-1), "seed: an integer of at least 0"),
        (lambda: CompressionState(None, "top-k"), "compressor: a Compressor"),  # type: ignore[arg-type]
        (lambda: CompressionState(None, TopK(1), memory="some"), "memory: one of"),
        (lambda: CompressionState(None, TopK(1), momentum=1.0), "momentum: below 1"),
        (lambda: CompressionState(None, TopK(1), memory="ef21", momentum=0.5), "momentum"),
        (lambda: CompressionState(None, TopK(1), start_iter=-1), "start_iter"),
        (lambda: CompressionState(7, TopK(1)), "process_group: a ProcessGroup"),  # type: ignore[arg-type]
    ],
)
def test_arguments_out_of_range_are_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make()


def test_states_are_independent_and_leave_the_generators_alone() -> None:
    before = torch.get_rng_state()
    one, other = (CompressionState(None, RandomK(RATIO)) for _ in range(2))
    one.own.of([1], [torch.ones(3)]).add_(5)
    assert torch.equal(other.own.of([1], [torch.ones(3)]), torch.zeros(3))
    list(RandomK(RATIO)._places([torch.ones(9)], [1], 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_another_model_is_refused() -> None:
    state = CompressionState(None, TopK(RATIO))
    state.own.of([1], [torch.ones(3)])
    saved = state.state_dict()
    fresh = CompressionState(None, TopK(RATIO))
    fresh.load_state_dict(saved)
    with pytest.raises(ValueError, match="parameter 1 from the end had 3 elements and has 4"):
        fresh.own.of([1], [torch.ones(4)])
    with pytest.raises(ValueError, match="another kind of state"):
        HookState().load_state_dict(saved)
