"""A sharded optimizer inside the hook steps, from its third step on, as a plain optimizer does."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.records.run import Run
from conformance.scenarios.hook import PEER_SILENT, SPARSE, SUBGROUPS, TRAINING
from conformance.scenarios.model import Param, Scenario
from tests.hooks_ref.algorithms import (
    PARAMS,
    every,
    gradients,
    other_tensors,
    require_same_bits,
    result,
    run_hook,
    scenario,
    torchs_own_fails,
    try_hook,
)
from tests.torch_marks import needs_complex_over_gloo

SUBJECT = "tests.hooks_ref.zero_overlap_subjects:zero"
VANILLA = "tests.hooks_ref.optimizer_overlap_subjects:vanilla"
NAMES = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]
TEN_STEPS = replace(TRAINING, steps=("normal",) * 10)
SGD: dict[str, Any] = {
    "algorithm": "SGD",
    "options": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
}
PLAIN_SGD: dict[str, Any] = {
    "algorithm": "SGD",
    "options": {"lr": 0.1, "momentum": 0.9},
}  # no weight decay: not with sparse gradients
ADAM: dict[str, Any] = {"algorithm": "Adam", "options": {"lr": 0.01}}
ADAGRAD: dict[str, Any] = {"algorithm": "Adagrad", "options": {"lr": 0.1}}
VACUOUS = 2
VACUOUS_STATIC = 3  # steps that leave the parameters alone


def setup(target: str, **kwargs: Any) -> str:
    return ",".join([target, *(f"{key}={value!r}" for key, value in kwargs.items())])


def overlapped(pool: Pool, what: Scenario, name: str, world: int = 2, **kwargs: Any) -> Run:
    return run_hook(pool, what, world, setup=setup(SUBJECT, name=name, **kwargs))


@functools.cache
def _vanilla(pool: Pool, what: Scenario, world: int, target: str) -> Run:
    return run_hook(pool, what, world, setup=target)


def vanilla(pool: Pool, what: Scenario, world: int = 2, start: int = VACUOUS, **kwargs: Any) -> Run:
    return _vanilla(pool, what, world, setup(VANILLA, start=start, **kwargs))


def require_same_tensors(one: Run, other: Run) -> None:
    """Everything recorded, parameters of every step among them, on every rank."""
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        assert mine.tensors.keys() == theirs.tensors.keys()
        assert other_tensors(mine.tensors, theirs.tensors) == []


@pytest.mark.parametrize(
    ("world", "shard", "kwargs"),
    [(2, False, SGD), (3, True, ADAM), (2, True, ADAGRAD)],
    ids=["SGD", "Adam", "Adagrad"],
)
@pytest.mark.parametrize("name", NAMES)
def test_trains_as_after_vanilla(
    pool: Pool, name: str, world: int, shard: bool, kwargs: dict[str, Any]
) -> None:
    require_same_tensors(
        overlapped(pool, TEN_STEPS, name, world, shard=shard, **kwargs),
        vanilla(pool, TEN_STEPS, world, **kwargs),
    )


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        *((name, "powerSGD") for name in NAMES),
        (NAMES[0], "torch_fp16_wrapped"),
        (NAMES[1], "elsewhere"),
    ],
)
def test_any_hook(pool: Pool, name: str, inner: str) -> None:
    require_same_tensors(
        overlapped(pool, TEN_STEPS, name, inner=inner, **SGD),
        vanilla(pool, TEN_STEPS, inner=inner, **SGD),
    )


@pytest.mark.parametrize(("name", "option"), list(zip(NAMES, ["decay", "accumulate"], strict=True)))
def test_accumulation_and_schedules(pool: Pool, name: str, option: str) -> None:
    require_same_tensors(
        overlapped(pool, TEN_STEPS, name, **{option: True}, **SGD),
        vanilla(pool, TEN_STEPS, **{option: True}, **SGD),
    )


@pytest.mark.parametrize(("name", "world"), list(zip(NAMES, [2, 3], strict=True)))
def test_agrees_with_an_oracle_to_the_last_bit(pool: Pool, name: str, world: int) -> None:
    """Momentum SGD in float64, all in powers of two.

    test_optimizer_overlap derives that it is exact in float32.
    """
    run = overlapped(
        pool,
        scenario(VACUOUS + 10, kind="crafted"),
        name,
        world,
        shard=True,
        options={"lr": 0.5, "momentum": 0.5},
    )
    for index in range(len(PARAMS)):
        parameter = buffer = torch.zeros((), dtype=torch.float64)
        for step in range(VACUOUS + 10):
            if step >= VACUOUS:
                buffer = buffer / 2 + gradients(run, step, index).mean(0)
                parameter = parameter - buffer / 2
            assert parameter.abs().max() < 2**11
            for rank in range(world):
                assert torch.equal(
                    result(run, rank, step, index),
                    parameter.expand(result(run, rank, step, index).shape),
                ), (
                    rank,
                    step,
                    index,
                )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("static", "vacuous"), [(False, VACUOUS), (True, VACUOUS_STATIC)], ids=["dynamic", "static"]
)
def test_the_first_steps_leave_parameters_alone(
    pool: Pool, name: str, static: bool, vacuous: int
) -> None:
    run = overlapped(pool, scenario(vacuous + 3), name, static=static, **SGD)
    for step, rank, index in every(run):
        assert bool(result(run, rank, step, index).any()) == (step >= vacuous), (step, rank, index)
    require_same_bits(run, vanilla(pool, scenario(vacuous + 3), start=vacuous, **SGD))


@pytest.mark.parametrize(("name", "shard"), list(zip(NAMES, [False, True], strict=True)))
def test_every_layout_and_shape(pool: Pool, name: str, shard: bool) -> None:
    require_same_bits(
        overlapped(pool, scenario(8), name, 3, shard=shard, **ADAM),
        vanilla(pool, scenario(8), 3, **ADAM),
    )


@pytest.mark.parametrize(
    "dtype", ["float64", "bfloat16", pytest.param("complex64", marks=needs_complex_over_gloo)]
)
def test_every_dtype(pool: Pool, dtype: str) -> None:
    what = scenario(
        5,
        params=(
            Param((3, 5), dtype),
            Param((7,), dtype),
            Param((4, 6), dtype, "transposed"),
            Param((), dtype),
        ),
    )
    require_same_bits(overlapped(pool, what, NAMES[1], **SGD), vanilla(pool, what, **SGD))


@pytest.mark.parametrize("name", NAMES)
def test_sparse_gradients(pool: Pool, name: str) -> None:
    of_one_dtype = tuple(param for param in SPARSE.params if param.dtype == "float32")
    what = replace(SPARSE, steps=("crafted",) * 5, params=of_one_dtype, groups=())
    require_same_bits(overlapped(pool, what, name, **PLAIN_SGD), vanilla(pool, what, **PLAIN_SGD))


@pytest.mark.parametrize(("name", "view"), list(zip(NAMES, [False, True], strict=True)))
def test_leaves_gradients_to_ddp(pool: Pool, name: str, view: bool) -> None:
    what = replace(scenario(5), ddp=replace(scenario(5).ddp, gradient_as_bucket_view=view))
    require_same_bits(
        overlapped(pool, what, name, shown=False, **SGD),
        run_hook(pool, scenario(5), hook="hooks_ref:allreduce_hook"),
    )


def test_one_rank(pool: Pool) -> None:
    require_same_bits(
        overlapped(pool, scenario(5), NAMES[1], 1, **SGD), vanilla(pool, scenario(5), 1, **SGD)
    )


@pytest.mark.parametrize(("name", "shard"), list(zip(NAMES, [True, False], strict=True)))
def test_on_subgroups(pool: Pool, name: str, shard: bool) -> None:
    """Two models at once, on a group in which a rank's place is not its global rank."""
    what = replace(scenario(5), groups=SUBGROUPS.groups)
    require_same_bits(
        overlapped(pool, what, name, 4, shard=shard, **SGD),
        vanilla(pool, what, 4, on_group=True, **SGD),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_collective_surfaces(pool: Pool, name: str) -> None:
    """The peer stays out of the first step that updates parameters."""
    assert PEER_SILENT.fault.step == VACUOUS
    run = try_hook(pool, PEER_SILENT, setup=setup(SUBJECT, name=name, shown=False, **SGD))
    assert run.ranks[0].first("fault", raised=True) is not None


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_refuses_gloo(pool: Pool, name: str) -> None:
    with torchs_own_fails("Overlapping DDP with ZeRO"):  # the rest differs between versions
        run_hook(pool, TRAINING, setup=setup(SUBJECT, name=name, whose="torchs", **SGD))


def test_refuses_wrong_arguments_and_lets_the_model_go(pool: Pool) -> None:
    run_hook(pool, scenario(1), setup="tests.hooks_ref.zero_overlap_subjects:refusals")
