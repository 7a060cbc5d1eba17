"""The quantization hooks, beside their definition in float64 and beside torch's own."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.records.run import Run
from conformance.scenarios.model import Param, Scenario
from hooks_ref._buckets import in_rows
from hooks_ref.quantization import _quantize, quantization_perchannel_hook
from tests.hooks_ref.algorithms import (
    PARAMS,
    every,
    gradients,
    memory_order,
    result,
    run_hook,
    scenario,
    torchs_own_fails,
    try_hook,
)
from tests.torch_marks import needs_quantization_hooks_of_a_cpu, observers_take_nan, taken_by_gloo

MODULE = "hooks_ref.quantization"
SUBJECTS = "tests.hooks_ref.quantization_subjects"
THEIRS = "torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks"
# The width of a row, by hook. 11 divides the size of one bucket, 77, without remainder.
WIDTHS = {
    f"{MODULE}:quantization_pertensor_hook": 10**9,
    f"{MODULE}:quantization_perchannel_hook": 512,
    f"{SUBJECTS}:perchannel_16": 16,
    f"{SUBJECTS}:perchannel_11": 11,
}
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def buckets(run: Run, step: int) -> Iterator[list[int]]:
    """Yield the parameters of each bucket, in the bucket's order."""
    for call in run.ranks[0].all("call", step=step):
        yield [int(name.removeprefix("p").removesuffix(".weight")) for name in call["parameters"]]


def of_bucket(run: Run, step: int, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and results of a bucket, both ``[W, numel]``, in the bucket's order."""
    orders = [(index, memory_order(run.scenario.params[index])) for index in indices]
    fed = torch.cat([gradients(run, step, index)[:, order] for index, order in orders], 1)
    got = [
        torch.cat([result(run, rank, step, index)[order] for index, order in orders])
        for rank in range(run.world)
    ]
    return fed, torch.stack(got)


def rows_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """``[W, numel]`` to ``[W, rows, width]``, with one more row of zeros than needed, as in
    torch's."""
    width = min(width, x.size(1) + 1)
    return torch.nn.functional.pad(x, (0, width - x.size(1) % width)).view(len(x), -1, width)


def definition(
    x: torch.Tensor, width: int, unit: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean of the ranks' quantized rows, our error bound, and ambiguous places."""
    rows = rows_of(x, width)
    low = rows.amin(2, keepdim=True).clamp(max=0)
    high = rows.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
    zero = (-low / scale).round().clamp(0, 255)
    value = scale * (((rows / scale).round() + zero).clamp(0, 255) - zero)
    near = [((y.abs() % 1) - 0.5).abs() <= 4 * 255 * unit for y in (rows / scale, low / scale)]
    ambiguous = near[0].double() + near[1].double()
    bound = (ambiguous * scale + (len(x) + 5) * unit * value.abs()).mean(0)
    flat = (tensor.reshape(-1)[: x.size(1)] for tensor in (value.mean(0), bound, ambiguous.amax(0)))
    return next(flat), next(flat), next(flat)


def require_definition(run: Run, width: int) -> float:
    """Require it at every step, bucket and rank.

    Return the part of the elements of normal steps whose rounding is ambiguous.

    A half bucket's result is rounded once more, to its dtype.
    """
    ambiguous = []
    for step, kind in enumerate(run.scenario.steps):
        for indices in buckets(run, step):
            dtype = run.scenario.params[indices[0]].dtype.replace("complex64", "float32")
            fed, got = of_bucket(run, step, indices)
            # The oracle's float64 is no better than the hook's: both are off.
            expected, bound, unclear = definition(
                fed, width, 2 * UNIT["float64"] if dtype == "float64" else UNIT["float32"]
            )
            if dtype in ("float16", "bfloat16"):
                # Half a unit in the last place, or half the smallest subnormal of float16
                # (bfloat16's is smaller).
                bound = bound + UNIT[dtype] * (expected.abs() + bound) + 2.0**-25
            for rank in range(run.world):
                assert ((got[rank] - expected).abs() <= bound).all(), (
                    step,
                    rank,
                    indices,
                    (got[rank] - expected).abs() - bound,
                )
                assert torch.equal(got[rank], got[0]), "not the same bits on all ranks"
            ambiguous += [unclear > 0] if kind == "normal" else []
    return float(torch.cat(ambiguous).double().mean())


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rarely), 3])
@pytest.mark.parametrize("hook", WIDTHS)
def test_each_step_is_what_the_definition_gives_on_all_ranks(
    pool: Pool, hook: str, world: int
) -> None:
    """Twelve steps in several buckets, across the rebuild.

    Then magnitudes from 1e-30 to 1e30, and zeros on one rank or all.
    """
    run = run_hook(
        pool,
        replace(scenario(15), steps=("normal",) * 12 + ("wide", "zero_one", "zero_all")),
        world,
        hook=hook,
    )
    assert require_definition(run, WIDTHS[hook]) < 0.03, (
        "inputs of this test: too many ties to say much"
    )
    for step, rank, index in every(run, range(14, 15)):
        assert torch.equal(
            result(run, rank, step, index), torch.zeros_like(result(run, rank, step, index))
        )


@pytest.mark.parametrize("hook", list(WIDTHS)[::2])
def test_other_dtypes(pool: Pool, hook: str) -> None:
    """In buckets of their own: DDP puts no two dtypes into one."""
    params = tuple(
        Param(shape, dtype)
        for dtype in ("float64", "float16", "bfloat16", "complex64")
        for shape in ((40,), (3, 5), ())
    )
    what = scenario(3, params=taken_by_gloo(params))
    require_definition(run_hook(pool, what, hook=hook), WIDTHS[hook])


@pytest.mark.parametrize("hook", list(WIDTHS)[::2])
def test_scalars_and_empty_parameters(pool: Pool, hook: str) -> None:
    """The last one alone in a bucket, which then has no elements."""
    params = (
        Param(()),
        Param((0,)),
        Param((1,)),
        Param((32,)),
        Param((4, 3, 2, 5), layout="channels_last"),
        Param((0,), "float64"),
    )
    require_definition(run_hook(pool, scenario(3, params=params), hook=hook), WIDTHS[hook])


@pytest.mark.parametrize("hook", list(WIDTHS)[::2])
def test_within_half_a_step_of_the_mean(pool: Pool, hook: str) -> None:
    """The error is at most the mean of scale / 2.

    This is half a level; the error of a clamped tie is half a level too. The rest of the bound is
    that of ``definition``: 4 * 255 u < 7e-5 scales, and 8u of a value of at most 255 scales, below
    2e-4 together.
    """
    run = run_hook(pool, scenario(4), 3, hook=hook)
    for step in range(4):
        for indices in buckets(run, step):
            fed, got = of_bucket(run, step, indices)
            rows = rows_of(fed, WIDTHS[hook])
            scale = (rows.amax(2).clamp(min=0) - rows.amin(2).clamp(max=0)) / 255
            bound = (scale * (0.5 + 2e-4)).mean(0).repeat_interleave(rows.size(2))[: fed.size(1)]
            assert ((got - fed.mean(0)).abs() <= bound).all()


# NaN and infinity


@pytest.mark.parametrize(
    "hook", [f"{MODULE}:quantization_pertensor_hook", f"{SUBJECTS}:perchannel_3"]
)
def test_what_is_not_finite_stays_so_in_its_row(pool: Pool, hook: str) -> None:
    """The row is not finite on all ranks, for any rank that fed the value.

    Other rows, and the next step, do not change.
    """
    width = WIDTHS.get(hook, 3)
    run = run_hook(
        pool, replace(scenario(4), steps=("normal", "nan", "inf", "normal")), 3, hook=hook
    )
    finite = 0
    for step in range(4):
        for indices in buckets(run, step):
            fed, got = of_bucket(run, step, indices)
            broken = ~rows_of(fed, width).isfinite().all(2).all(0)
            broken = broken.repeat_interleave(min(width, fed.size(1) + 1))[: fed.size(1)]
            assert not got[:, broken].isfinite().any()
            expected, bound, _ = definition(fed, width, UNIT["float32"])
            assert ((got - expected).abs() <= bound)[:, ~broken].all()
            finite += int((~broken).sum()) if step in (1, 2) else 0
    assert finite > 0 or width > 3


# torch's own


@needs_quantization_hooks_of_a_cpu
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rarely), 3])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("pertensor_as_torch", "torch_pertensor"),
        ("perchannel_as_torch", "torch_perchannel"),
        ("perchannel_11_as_torch", "torch_perchannel_11"),
    ],
)
def test_gives_the_bits_that_torch_gives(pool: Pool, ours: str, theirs: str, world: int) -> None:
    """torch's own, with its future re-wrapped; float32. One parameter fills whole rows of 512.

    Ours has the least scale of torch's here, which loses rows of small values.
    """
    kinds = (
        "normal",
        "normal",
        "wide",
        "tiny",
        "crafted",
        "zero_all",
        "zero_one",
        *(("nan",) if observers_take_nan() else ()),
        "inf",
        "normal",
    )
    what = replace(
        scenario(len(kinds), params=(*PARAMS, Param((1024,)), Param((600,)))), steps=kinds
    )
    one, other = (run_hook(pool, what, world, hook=f"{SUBJECTS}:{name}") for name in (ours, theirs))
    for step, rank, index in every(one):
        mine, torchs = (result(run, rank, step, index) for run in (one, other))
        assert torch.equal(mine.isnan(), torchs.isnan()), (step, rank, index)
        assert torch.equal(mine.nan_to_num(), torchs.nan_to_num()), (step, rank, index)


@needs_quantization_hooks_of_a_cpu
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quantization_pertensor_hook", "invalid index of a 0-dim tensor"),
        ("quantization_perchannel_hook", "too many indices for tensor of dimension 2"),
    ],
)
def test_torchs_own_fails_on_gloo(pool: Pool, name: str, said: str) -> None:
    run_hook(pool, scenario(2), hook=f"{MODULE}:{name}")
    with torchs_own_fails(said):
        run_hook(pool, scenario(2), hook=f"{THEIRS}:{name}")


# The rest


@pytest.mark.parametrize("hook", list(WIDTHS)[1:2])
def test_sparse_gradients_are_averaged_as_they_are(pool: Pool, hook: str) -> None:
    """Exact sums: crafted."""
    run = run_hook(
        pool,
        scenario(3, params=(Param((10, 3), layout="sparse"), Param((7,))), kind="crafted"),
        hook=hook,
    )
    for step, rank, _ in every(run):
        assert torch.equal(result(run, rank, step, 0), gradients(run, step, 0).mean(0))


@pytest.mark.parametrize("hook", list(WIDTHS)[1:2])
def test_averages_over_the_group_it_is_given(pool: Pool, hook: str) -> None:
    """Two models on two groups.

    Each gets the mean of its own ranks, not in the order of global ranks.
    """
    what = replace(scenario(2), groups=((1, 3), (0, 2)))
    run = run_hook(pool, what, 4, hook=hook)
    for step, rank, index in every(run):
        fed = gradients(run, step, index)[list(run.group(rank))]
        # Within one level of a bucket's range, the ranks' largest magnitudes of the step.
        largest = max(float(gradients(run, step, i).abs().max()) for i in range(len(PARAMS)))
        assert ((result(run, rank, step, index) - fed.mean(0)).abs() <= 2 * largest / 255).all()


@pytest.mark.parametrize("fault", ["collective_raises", "peer_dies"])
@pytest.mark.parametrize("hook", list(WIDTHS)[:2])
def test_failures_surface(pool: Pool, hook: str, fault: str) -> None:
    what: Scenario = replace(
        scenario(3, kind="crafted"), fault=replace(scenario(3, kind="crafted").fault, kind=fault)
    )
    run = try_hook(pool, what, hook=hook)
    faults = run.ranks[1 if fault == "collective_raises" else 0].all("fault")
    assert [(found["unused"], found["raised"]) for found in faults] == [(False, True)]


@pytest.mark.parametrize(
    ("bucket_size", "error"),
    [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)],
)
def test_bucket_size_out_of_range_is_named(bucket_size: Any, error: type[Exception]) -> None:
    bucket: Any = None
    with pytest.raises(error, match="bucket_size: an integer of at least 1"):
        quantization_perchannel_hook(bucket, bucket, bucket_size=bucket_size)


@pytest.mark.parametrize(
    ("numel", "width", "rows"),
    [(1024, 512, 2), (1025, 512, 3), (10, 512, 1), (1000, 10**9, 1), (1, 1, 1), (0, 512, 0)],
)
def test_a_byte_per_element_and_two_numbers_per_row(numel: int, width: int, rows: int) -> None:
    """There is no row more than needed, and a bucket smaller than a row is not padded."""
    scales, levels = _quantize(
        in_rows(torch.randn(numel, generator=torch.Generator().manual_seed(numel)), width)
    )
    assert scales.shape == (2, rows, 1)
    assert levels.dtype == torch.uint8
    assert (
        levels.numel() == rows * math.ceil(numel / max(1, rows)) if numel < width else rows * width
    )
