"""An optimizer that averages: its steps, averages, saved state and shared attributes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hooks_ref
from conformance.hosts.pool import Pool
from conformance.records.run import Run
from tests.hooks_ref.algorithms import (
    PARAMS,
    gradients,
    require_same_bits,
    result,
    run_hook,
    scenario,
)

SUBJECTS = "tests.hooks_ref.averaging_subjects"
CONTIGUOUS = tuple(spec for spec in PARAMS if spec.layout == "contiguous")
OPTIONS = {"period": 3, "warmup_steps": 2}


def run(pool: Pool, subject: str, **given: Any) -> Run:
    setup = ",".join(
        [f"{SUBJECTS}:{subject}", *(f"{key}={value!r}" for key, value in given.items())]
    )
    return run_hook(pool, scenario(12, params=CONTIGUOUS), setup=setup)


def test_steps_then_averages(pool: Pool) -> None:
    mine = run(pool, "stepped", **OPTIONS)
    require_same_bits(mine, run(pool, "averaged", name="PeriodicModelAverager", **OPTIONS))
    require_same_bits(mine, run(pool, "stepped", torchs=True, **OPTIONS))


def test_a_step_that_one_rank_skips(pool: Pool) -> None:
    """Ranks still average together, at the same steps: rank 1 only lacks one gradient."""
    mine = run(pool, "stepped", overflow=(1, 3), **OPTIONS)
    values = torch.zeros_like(gradients(mine, 0, 0))
    for step in range(12):
        values = values - gradients(mine, step, 0)
        if step == 3:
            values[1] += gradients(mine, step, 0)[1]
        if step >= 2 and (step - 2) % 3 == 0:
            values[:] = values.mean(0)
        for rank in range(2):
            assert torch.allclose(result(mine, rank, step, 0), values[rank], rtol=0, atol=1e-4), (
                step,
                rank,
            )


class Counts(hooks_ref.ModelAverager):
    """Records the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def average_parameters(self, params: Any) -> None:
        self.asked.append([group["lr"] for group in params])
        self.step += 1


def made(**options: Any) -> tuple[hooks_ref.PostLocalSGDOptimizer, torch.nn.Parameter, Counts]:
    parameter = torch.nn.Parameter(torch.ones(3))
    averager = Counts()
    parameter.grad = torch.full((3,), 0.5)
    return (
        hooks_ref.PostLocalSGDOptimizer(torch.optim.SGD([parameter], lr=1.0, **options), averager),
        parameter,
        averager,
    )


def test_shares_groups_and_state() -> None:
    optimizer, parameter, averager = made(momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert [round(lr, 6) for [lr] in averager.asked] == [1.0, 0.1]
    assert optimizer.state[parameter] is optimizer.optim.state[parameter]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5})
    assert len(optimizer.optim.param_groups) == len(optimizer.param_groups) == 2
    optimizer.zero_grad()
    assert parameter.grad is None


def test_a_closure_and_what_comes_after_a_step() -> None:
    optimizer, parameter, _ = made()
    seen: list[float] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(float(parameter.detach()[0])))

    def closure() -> torch.Tensor:
        return parameter.detach().sum()

    assert float(optimizer.step(closure)) == 3.0
    assert seen == [0.5]


def test_the_count_of_steps_is_saved() -> None:
    optimizer, _, averager = made(momentum=0.9)
    for _ in range(3):
        optimizer.step()
    saved = optimizer.state_dict()
    other, _, others = made(momentum=0.9)
    other.load_state_dict(saved)
    assert (others.step, other.state_dict()["state"].keys()) == (
        averager.step,
        saved["state"].keys(),
    )
    assert other.state is other.optim.state
    with pytest.warns(UserWarning, match="Setting step counter to 0"):
        other.load_state_dict(optimizer.optim.state_dict())
    assert others.step == 0
    other, _, others = made()
    other.load_state_dict({**optimizer.optim.state_dict(), "step": 9})  # as torch's saves it
    assert others.step == 9


def test_arguments() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: hooks_ref.PostLocalSGDOptimizer(torch.optim.SGD, Counts()),
            "optim: an instance of torch.optim.Optimizer",
        ),  # type: ignore[arg-type]
        (lambda: hooks_ref.PostLocalSGDOptimizer(sgd, 4), "averager: a ModelAverager"),  # type: ignore[arg-type]
    ]
    for call, said in calls:
        with pytest.raises(TypeError, match=said):
            call()
