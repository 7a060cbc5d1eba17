"""Quantized collectives: the collective of quantized values, and the error of quantization."""

import math
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import hooks_ref
from conformance.hosts.pool import Pool
from conformance.scenarios.hook import SUBGROUPS
from conformance.scenarios.model import Param, Scenario
from hooks_ref.quantized_collectives import BLOCK, dequantize, quantize
from tests.cases import in_turns
from tests.hooks_ref.algorithms import run_hook

SUBJECTS = "tests.hooks_ref.quantized_subjects"
WHAT = Scenario("algorithm", "one step", (Param((3,)),), ("crafted",), initial_value=0.0)
KINDS = [kind.name for kind in hooks_ref.DQuantType]
COLLECTIVES = ["all_gather", "all_to_all", "all_to_all_single", "scatter"]
OF_SUMS = ["all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_reduce"]


def run(pool: Pool, name: str, world: int, what: Scenario = WHAT, **given: Any) -> None:
    """Run a subject, which checks itself."""
    run_hook(
        pool,
        what,
        world,
        setup=",".join(
            [f"{SUBJECTS}:{name}", *(f"{key}={value!r}" for key, value in given.items())]
        ),
    )


@pytest.mark.parametrize(
    ("name", "kind"), in_turns([(name, kind) for name in COLLECTIVES for kind in KINDS], 3)
)
def test_is_the_collective_of_quantized_values(pool: Pool, name: str, kind: str) -> None:
    run(
        pool,
        "equals",
        3,
        of=name,
        qtype=kind,
        loss=4.0 if kind in ("FP16", "INT8") else None,
        waits=kind in ("FP16", "FP8"),
    )


@pytest.mark.parametrize("name", COLLECTIVES)
def test_on_subgroups(pool: Pool, name: str) -> None:
    what = Scenario(
        "algorithm",
        "two groups",
        WHAT.params,
        ("crafted",),
        groups=SUBGROUPS.groups,
        initial_value=0.0,
    )
    run(pool, "equals", 4, what, of=name, qtype="INT8")


@pytest.mark.parametrize(
    ("name", "kind"), in_turns([(name, kind) for name in OF_SUMS for kind in KINDS], 3)
)
def test_collectives_of_sums_and_of_one_tensor(pool: Pool, name: str, kind: str) -> None:
    run(pool, "sums", 3, of=name, qtype=kind, waits=kind in ("FP16", "FP8"))


@pytest.mark.parametrize("kind", ["INT8", "FP8", "FP16"])
def test_errors_are_fed_back(pool: Pool, kind: str) -> None:
    run(pool, "fed_back", 2, qtype=kind)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "all_to_all_single"])
def test_lists_may_be_used_again_before_the_wait(pool: Pool, name: str) -> None:
    run(pool, "lists_used_again", 2, of=name)


def test_errors_belong_to_a_group(pool: Pool) -> None:
    run(pool, "fed_back_by_group", 2)


def test_averages_may_be_near_the_end_of_the_range(pool: Pool) -> None:
    run(pool, "averages_near_the_range", 2)


@pytest.mark.parametrize("kind", hooks_ref.DQuantType)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_round_trip(kind: hooks_ref.DQuantType, scale: float) -> None:
    """Within the error that the module states, in float64."""
    fed = (torch.randn(1000, generator=torch.Generator().manual_seed(5)) * scale).double()
    error = (dequantize(quantize(fed.float(), kind), kind, fed) - fed).abs()
    blocks = torch.nn.functional.pad(fed, (0, -1000 % BLOCK)).view(-1, BLOCK).abs().amax(1)
    largest = blocks.repeat_interleave(BLOCK)[:1000]
    bound = {
        "FP16": fed.abs() * 2**-11 + 2**-25,
        "BFP16": fed.abs() * 2**-8,
        "INT8": largest / 254 * (1 + 1e-6),
        "FP8": fed.abs() * 2**-4 + largest / 448 * 2**-10 + 1e-6 * largest,
    }[kind.name]
    assert (error <= bound).all(), (error / bound).max()
    assert error.any()


@pytest.mark.parametrize("kind", hooks_ref.DQuantType)
def test_special_values(kind: hooks_ref.DQuantType) -> None:
    for value in (math.nan, math.inf):
        fed = torch.ones(200)
        fed[3] = value
        got = dequantize(quantize(fed, kind), kind, fed)
        assert bool(got[3].isfinite()) == (kind is hooks_ref.DQuantType.FP16 and value == math.inf)
        assert got[150:].eq(1).all()
    zeros = torch.zeros(130)
    assert torch.equal(dequantize(quantize(zeros, kind), kind, zeros), zeros)


def test_arguments() -> None:
    with pytest.raises(
        TypeError, match=r"func: one of torch\.distributed's all_gather, all_to_all,"
    ):
        hooks_ref.auto_quantize(dist.broadcast, hooks_ref.DQuantType.FP16)
    with pytest.raises(TypeError, match="qtype: a DQuantType"):
        hooks_ref.auto_quantize(dist.all_gather, "fp16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="floating point"):
        hooks_ref.auto_quantize(dist.all_gather, hooks_ref.DQuantType.FP16)(
            [torch.ones(1)], torch.ones(1, dtype=torch.int32)
        )
    with pytest.raises(ValueError, match=r"op: ReduceOp\.SUM or ReduceOp\.AVG"):
        hooks_ref.auto_quantize(dist.all_reduce, hooks_ref.DQuantType.FP16)(
            torch.ones(1), dist.ReduceOp.MAX
        )


@pytest.mark.parametrize("kind", list(hooks_ref.DQuantType))
def test_takes_an_empty_tensor_of_numpy(kind: hooks_ref.DQuantType) -> None:
    """Its stride is 0, with which torch refuses to view it as bytes."""
    tensor = torch.from_numpy(numpy.empty(0, dtype=numpy.float32))
    assert tensor.stride() == (0,)
    assert dequantize(quantize(tensor, kind), kind, tensor).shape == (0,)
