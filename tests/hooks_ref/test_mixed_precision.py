"""The mean in another dtype than the parameters', against an oracle and torch's native mode."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.records.run import Run
from conformance.scenarios.hook import COLLECTIVE_RAISES, SPARSE, TRAINING
from conformance.scenarios.model import Param, Scenario
from hooks_ref.mixed_precision import MixedPrecisionState
from tests.hooks_ref.algorithms import (
    PARAMS,
    every,
    gradients,
    require_same_bits,
    result,
    run_hook,
    scenario,
    torchs_own_fails,
    try_hook,
)
from tests.torch_marks import needs_build_for_cpu, taken_by_gloo

SUBJECTS = "tests.hooks_ref.mixed_precision_subjects"
HOOK = "hooks_ref.mixed_precision:allreduce_and_upcast_hook"
IN_BFLOAT16 = tuple(replace(param, dtype="bfloat16") for param in PARAMS)
DTYPES = tuple(
    Param((3, 5), dtype) for dtype in ("float32", "float64", "float16", "bfloat16", "complex64")
)


def reduced(pool: Pool, what: Scenario, dtype: str, world: int = 2) -> Run:
    return run_hook(pool, what, world, hook=HOOK, state=f"{SUBJECTS}:state,dtype={dtype}")


def oracle(
    run: Run, step: int, index: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the bound on the hook's error, in float64.

    A share x / W is rounded to the wider dtype and to ``dtype`` (u is half of its eps, and the
    wider's at most as much), or is a subnormal of ``dtype`` (then it is off by at most half of the
    smallest); W - 1 additions round once each; the result is rounded once to the parameter's dtype
    (v). So the shares carry at most W + 2 roundings.
    """
    own = getattr(torch, run.scenario.params[index].dtype)
    shares = gradients(run, step, index) / run.world
    u = torch.finfo(dtype).eps / 2
    v = torch.finfo(own).eps / 2
    relative = (1 + u) ** (run.world + 1) * (1 + v) - 1
    return shares.sum(0), relative * shares.abs().sum(0) + run.world * torch.finfo(
        dtype
    ).smallest_normal * torch.finfo(dtype).eps


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rarely), 3])
@pytest.mark.parametrize(
    ("dtype", "params"),
    [("float16", PARAMS), ("bfloat16", PARAMS), ("float32", IN_BFLOAT16), ("float64", PARAMS)],
)
def test_agrees_with_an_oracle(
    pool: Pool, dtype: str, params: tuple[Param, ...], world: int
) -> None:
    run = reduced(pool, scenario(10, params=params), dtype, world)
    wire = getattr(torch, dtype)
    for step, rank, index in every(run):
        mean, bound = oracle(run, step, index, wire)
        got = result(run, rank, step, index)
        assert ((got - mean).abs() <= bound).all(), (step, rank, index)
        assert torch.equal(got, got.to(wire).double()), "not all of it was summed in that dtype"
        assert torch.equal(got, result(run, 0, step, index)), "the ranks differ"


@pytest.mark.parametrize(
    ("dtype", "params"), [("float16", PARAMS), ("bfloat16", PARAMS), ("float32", IN_BFLOAT16)]
)
def test_agrees_with_an_oracle_to_the_last_bit(
    pool: Pool, dtype: str, params: tuple[Param, ...]
) -> None:
    """On two ranks there is one addition, which no order can round otherwise; halving is exact."""
    run = reduced(pool, scenario(4, params=params), dtype)
    wire = getattr(torch, dtype)
    for step, rank, index in every(run):
        shares = (gradients(run, step, index) / 2).to(wire)
        mean = (shares[0] + shares[1]).to(getattr(torch, params[index].dtype)).double()
        assert torch.equal(result(run, rank, step, index), mean), (step, rank, index)


def test_float32_for_bfloat16_rounds_only_the_mean(pool: Pool) -> None:
    """Within one rounding to bfloat16, and fewer than 5 of float32 (a division, two additions).

    A sum in bfloat16 does not stay within this bound.
    """
    ours = reduced(pool, scenario(3, params=IN_BFLOAT16), "float32", 3)
    plain = run_hook(pool, scenario(3, params=IN_BFLOAT16), 3, hook="hooks_ref:allreduce_hook")
    within = {}
    for name, run in (("ours", ours), ("plain", plain)):
        within[name] = True
        for step, _, index in every(run):
            fed = gradients(run, step, index)
            bound = fed.mean(0).abs() * 2.0**-8 + 5 * 2.0**-24 * fed.abs().mean(0)
            within[name] &= bool(((result(run, 0, step, index) - fed.mean(0)).abs() <= bound).all())
    assert within == {"ours": True, "plain": False}


@pytest.mark.parametrize(
    ("dtype", "hook"),
    [
        ("float16", "fp16_compress_hook"),
        ("bfloat16", "bf16_compress_hook"),
        ("float32", "allreduce_hook"),
    ],
)
def test_is_the_compression_hook_for_float32_parameters(pool: Pool, dtype: str, hook: str) -> None:
    require_same_bits(
        reduced(pool, scenario(3), dtype), run_hook(pool, scenario(3), hook=f"hooks_ref:{hook}")
    )


def test_divides_before_it_casts(pool: Pool) -> None:
    """1e5 and 0 have the mean 5e4, which float16 holds to half a unit in the last place, 16."""
    run = run_hook(pool, scenario(1), setup=f"{SUBJECTS}:fed_1e5")
    for step, rank, index in every(run):
        assert ((result(run, rank, step, index) - 5e4).abs() <= 16).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_in_one_model(pool: Pool, dtype: str) -> None:
    """Crafted values, on which no dtype rounds."""
    run = reduced(pool, scenario(3, params=taken_by_gloo(DTYPES), kind="crafted"), dtype)
    for step, rank, index in every(run):
        assert torch.equal(result(run, rank, step, index), gradients(run, step, index).mean(0)), (
            step,
            rank,
            index,
        )


def test_a_sparse_bucket_is_averaged_in_its_own_dtype(pool: Pool) -> None:
    # float16 holds the crafted values of the dense bucket.
    what = replace(SPARSE, steps=("crafted",) * 3, groups=())
    require_same_bits(
        reduced(pool, what, "float16"), run_hook(pool, what, hook="hooks_ref:allreduce_hook")
    )


@needs_build_for_cpu
def test_torchs_native_mixed_precision_needs_an_accelerator(pool: Pool) -> None:
    with torchs_own_fails("cpu backend doesn't support events"):
        run_hook(pool, TRAINING, setup=f"{SUBJECTS}:torchs")


def test_a_failed_collective_surfaces(pool: Pool) -> None:
    run = try_hook(pool, COLLECTIVE_RAISES, hook=HOOK, state=f"{SUBJECTS}:state,dtype=float16")
    assert [rank.first("fault", raised=True) is not None for rank in run.ranks] == [True, True]


def test_resumes_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    whole = run_hook(pool, scenario(12), setup=f"{SUBJECTS}:saved")
    run_hook(pool, scenario(6), setup=f"{SUBJECTS}:saved,save={tmp_path}")
    rest = run_hook(pool, scenario(6, first_step=6), setup=f"{SUBJECTS}:saved,load={tmp_path}")
    require_same_bits(rest, whole, steps=lambda step: step + 6)
    state = torch.load(tmp_path / "0.pt", weights_only=True)
    assert (state.iter, state.reduce_dtype, state.process_group) == (6, torch.bfloat16, None)


def test_refuses_wrong_arguments() -> None:
    for dtype in ("float16", 16, torch.zeros(1)):
        with pytest.raises(TypeError, match=r"reduce_dtype: one of .*float16"):
            MixedPrecisionState(None, dtype)  # type: ignore[arg-type]
    for integral in (torch.int64, torch.complex64, torch.bool):
        with pytest.raises(ValueError, match=r"reduce_dtype: one of .*float16"):
            MixedPrecisionState(None, integral)
    with pytest.raises(TypeError, match="process_group"):
        MixedPrecisionState(torch.float16)  # type: ignore[arg-type]


def test_needs_no_group_until_it_is_used() -> None:
    before = torch.get_rng_state()
    one = MixedPrecisionState(reduce_dtype=torch.float16)
    other = MixedPrecisionState(None)
    assert (one.reduce_dtype, other.reduce_dtype) == (torch.float16, None)
    assert torch.equal(torch.get_rng_state(), before)
