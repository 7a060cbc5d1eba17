"""Tests of the oracle of optimizers: torch's own steps lie within its bounds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.judging.oracles.local_optimizer import LocalOptimizer

OPTIONS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.13, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.07}),
    (torch.optim.SGD, {"lr": 0.03, "momentum": 0.7, "nesterov": True, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.02, "betas": (0.7, 0.91), "eps": 1e-3, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.02, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"lr": 0.02, "betas": (0.7, 0.91), "weight_decay": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.3, "weight_decay": 0.1}),
]
STEPS = 12


def steps_of_torch(
    make: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, LocalOptimizer]:
    """Return the parameter after torch's steps, and the oracle after the same steps."""
    draw = torch.Generator().manual_seed(7)
    start = torch.randn(200, generator=draw, dtype=torch.float64).to(dtype)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make([parameter], **options)
    oracle = LocalOptimizer([start.double()], [dtype], make.__name__)
    for _ in range(STEPS):
        grad = torch.randn(200, generator=draw, dtype=torch.float64).to(dtype)
        parameter.grad = grad.clone()
        optimizer.step()
        oracle.step(0, grad.double(), torch.zeros(200, dtype=torch.float64), options)
    return parameter.detach().double(), oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("make", "options"), OPTIONS)
def test_torchs_steps_lie_within_the_bound(
    make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    got, oracle = steps_of_torch(make, options, dtype)
    errors = (got - oracle.values[0]).abs()
    # The oracle itself rounds in float64.
    assert bool((errors <= oracle.errors[0] + 1e-14).all())


@pytest.mark.parametrize(("make", "options"), OPTIONS)
def test_half_precision_lies_within_its_bound(
    make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    if make is not torch.optim.SGD:
        pytest.skip("the kit steps half precision by SGD alone")
    got, oracle = steps_of_torch(make, options, torch.bfloat16)
    assert bool(((got - oracle.values[0]).abs() <= oracle.errors[0]).all())


@pytest.mark.parametrize(("make", "options"), OPTIONS)
def test_the_bound_is_a_small_multiple_of_epsilon(
    make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """A change of an option by a thousandth lies outside of it."""
    _, oracle = steps_of_torch(make, options, torch.float32)
    changed, _ = steps_of_torch(make, {**options, "lr": options["lr"] * 1.001}, torch.float32)
    is_outside = (changed - oracle.values[0]).abs() > 2 * oracle.errors[0]
    assert is_outside.double().mean() > 0.9


def test_a_saved_state_is_restored() -> None:
    oracle = LocalOptimizer([torch.ones(3, dtype=torch.float64)], [torch.float32])
    options = {"lr": 0.5, "momentum": 1.0}
    grad = torch.ones(3, dtype=torch.float64)
    oracle.step(0, grad, torch.zeros_like(grad), options)
    saved = oracle.saved()
    values = oracle.values[0]
    oracle.step(0, grad, torch.zeros_like(grad), options)
    assert oracle.values[0].tolist() == [-0.5] * 3
    oracle.restore(saved)
    assert torch.equal(oracle.values[0], values)
    assert oracle.counts == [1]
