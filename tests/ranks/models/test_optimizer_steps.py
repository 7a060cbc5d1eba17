"""Steps of the trainer's optimizer that are taken back."""

from typing import Any

import pytest
import torch

from conformance.ranks.models.optimizer_steps import step_and_put_back, step_faintly


def _parameters() -> list[torch.nn.Parameter]:
    wide = torch.arange(20.0).reshape(4, 5)
    made = [
        torch.nn.Parameter(torch.tensor([1.0, -0.0, 3.0])),
        torch.nn.Parameter(wide[:, 1:3]),
        torch.nn.Parameter(torch.ones(3, dtype=torch.float16)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        torch.nn.Parameter(torch.ones(3, 2)),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.zeros(0)),
    ]
    for one in made[:4]:
        one.grad = torch.full_like(one, 0.3)
    made[4].grad = torch.eye(3, 2).to_sparse(1)
    made[6].grad = torch.zeros(0)
    return made


def _optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.25)


def _step(optimizer: torch.optim.SGD, parameters: list[torch.nn.Parameter]) -> dict[str, bool]:
    return step_and_put_back(optimizer, {one: f"p{n}" for n, one in enumerate(parameters)}, 4)


def test_parameters_and_gradients_are_as_before() -> None:
    parameters = _parameters()
    before = [one.detach().clone() for one in parameters]
    places = [one.data_ptr() for one in parameters]
    gradients = [one.grad for one in parameters]
    optimizer = _optimizer(parameters)
    seen: list[bool] = []
    optimizer.register_step_post_hook(
        lambda *_: seen.extend(
            not torch.equal(a, b) for a, b in zip(parameters, before, strict=True)
        )
    )
    assert not _step(optimizer, parameters)
    assert seen == [True, True, True, True, True, False, False]
    step_faintly(optimizer, parameters)
    assert seen[7:] == [False] * 7
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    assert parameters[0].detach().signbit().tolist() == [False, True, False]
    assert [one.data_ptr() for one in parameters] == places
    assert all(a.grad is b for a, b in zip(parameters, gradients, strict=True))


def test_no_bit_changes_by_faint_gradients_and_their_norm_is_not_zero() -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    values = torch.tensor([1.0, -1.0, 2.0, 1.9, -0.0, 0.0, 3e-8, -6e4])
    parameters = [torch.nn.Parameter(values.to(dtype)) for dtype in dtypes]
    for one in parameters:
        one.grad = torch.zeros_like(one)
    before = [one.detach().clone() for one in parameters]
    norms: list[float] = []
    optimizer = torch.optim.SGD(parameters, lr=8.0)
    optimizer.register_step_pre_hook(
        lambda *_: norms.extend(float(torch.linalg.vector_norm(one.grad)) for one in parameters)
    )
    step_faintly(optimizer, parameters)
    assert all(norms)
    for one, values in zip(parameters, before, strict=True):
        assert torch.equal(one.detach(), values)
        assert torch.equal(one.detach().real.signbit(), values.real.signbit())


def test_gradients_that_are_not_finite_are_faint_in_the_step() -> None:
    parameters = _parameters()[:2]
    parameters[0].grad = gradient = torch.tensor([1.0, torch.nan, torch.inf])
    optimizer = _optimizer(parameters)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameters[0].grad))
    assert not _step(optimizer, parameters)
    assert 0 < seen[0].abs().max() < 1e-12
    assert parameters[0].grad is gradient


def _halve_gradient(optimizer: torch.optim.SGD, *_: Any) -> None:
    optimizer.param_groups[0]["params"][1].grad.div_(2)


@torch.no_grad()
def _decay(optimizer: torch.optim.SGD, *_: Any) -> None:
    optimizer.param_groups[0]["params"][1].mul_(0.5)


@pytest.mark.parametrize("change", ["before", "after", "option"])
def test_a_step_that_others_have_changed_is_found(change: str) -> None:
    parameters = _parameters()[:2]
    before = [one.detach().clone() for one in parameters]
    optimizer = _optimizer(parameters)
    if change == "before":
        optimizer.register_step_pre_hook(_halve_gradient)
    elif change == "after":
        optimizer.register_step_post_hook(_decay)
    else:
        optimizer.param_groups[0]["weight_decay"] = 0.5
    moved = _step(optimizer, parameters)
    assert moved == dict.fromkeys(["p0", "p1"] if change == "option" else ["p1"], False)
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))


def _divide(optimizer: torch.optim.SGD, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.div_(4)


def test_a_step_that_divides_by_the_number_of_ranks_is_told() -> None:
    parameters = _parameters()[:5]
    optimizer = _optimizer(parameters)
    optimizer.register_step_pre_hook(_divide)
    assert _step(optimizer, parameters) == {f"p{n}": True for n in range(5)}


def test_gradients_of_zeros_alone_are_faint_in_the_step() -> None:
    parameters = _parameters()[:2]
    for one in parameters:
        one.grad = torch.zeros_like(one)
    optimizer = _optimizer(parameters)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameters[0].grad))
    assert not _step(optimizer, parameters)
    assert seen[0].any()


def test_a_gradient_in_another_dtype_than_its_parameter_is_as_before() -> None:
    (parameter,) = parameters = [torch.nn.Parameter(torch.tensor([1.0, -2.0]))]
    parameter.grad = torch.zeros(2)
    parameter.grad.data = gradient = torch.tensor([0.5, torch.inf], dtype=torch.bfloat16)
    before = gradient.clone()
    optimizer = _optimizer(parameters)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad.clone()))
    assert not _step(optimizer, parameters)
    step_faintly(optimizer, parameters)
    assert len(seen) == 2
    assert all(0 < one.abs().max() < 1e-12 for one in seen)
    assert torch.equal(gradient, before)
    assert parameter.tolist() == [1.0, -2.0]
