"""Each known mistake is named by its pattern."""

import pytest
import torch

from conformance.judging.likely_causes import diagnose
from conformance.judging.oracles.mean import mean
from conformance.records.run import Run
from conformance.scenarios.hook import ACCUMULATED, SUBGROUPS, VALUES
from conformance.subjects.claims import Claims
from tests.made_runs import Result, made_run


def _ramp(run: Run, index: int) -> torch.Tensor:
    """Return 1, 2, 3 ..., an offset that no known mistake leaves."""
    return torch.arange(1.0, 1 + len(run.fed(0, 0, index)))


NORMAL = VALUES.steps.index("normal")
CASES = {
    "the sum was not divided": lambda run, r, s, i: mean(run, r, s, i) * run.world,
    "divided twice": lambda run, r, s, i: mean(run, r, s, i) / run.world,
    "nothing was communicated": lambda run, r, s, i: run.fed(r, s, i),
    "it was divided, but nothing was communicated": lambda run, r, s, i: (
        run.fed(r, s, i) / run.world
    ),
    "equal to rank 0's gradient": lambda run, r, s, i: run.fed(0, s, i),
    "one step late": lambda run, r, s, i: mean(run, r, max(s - 1, 0), i),
    "wrong sign": lambda run, r, s, i: -mean(run, r, s, i),
    "is zero": lambda run, r, s, i: mean(run, r, s, i) * 0,
    "1.5 times the mean": lambda run, r, s, i: mean(run, r, s, i) * 1.5,
    "0.01 times what the parameters hold": lambda run, r, s, i: (
        mean(run, r, s, i) + 0.01 * run.scenario.initial_value
    ),
    "fraction cut off": lambda run, r, s, i: mean(run, r, s, i).trunc(),
    "wrong on rank 1": lambda run, r, s, i: mean(run, r, s, i) + (r == 1) * _ramp(run, i),
}


@pytest.mark.parametrize("cause", CASES)
def test_names_the_mistake(cause: str) -> None:
    run = made_run(CASES[cause], world=3)
    assert cause in diagnose(run, 1, Claims())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_names_a_rounding(dtype: str) -> None:
    run = made_run(lambda run, r, s, i: mean(run, r, s, i).to(getattr(torch, dtype)).double())
    assert diagnose(run, NORMAL, Claims()).startswith("equal to the mean rounded to " + dtype)


def test_names_an_uneven_tail() -> None:
    def without_tail(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        result = mean(run, rank, step, index)
        if index == len(run.scenario.params) - 1:
            result[-2:] = run.fed(rank, step, index)[-2:]  # 47 elements on 3 ranks: 2 are left over
        return result

    assert "uneven tail" in diagnose(made_run(without_tail, world=3), 0, Claims())


def test_names_the_wrong_group() -> None:
    run = made_run(lambda run, r, s, i: mean(run, r, s, i, (0, 1, 2, 3)), SUBGROUPS, world=4)
    assert "mean over WORLD" in diagnose(run, 0, Claims())
    run = made_run(lambda run, r, s, i: mean(run, r, s, i) / 2, SUBGROUPS, world=4)
    assert "divided by the size of WORLD" in diagnose(run, 0, Claims())


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (
            lambda run, r, s, i: run.fed(r, s, i) / run.world,
            "equal to this rank's own gradient divided by world_size: it was divided, but nothing "
            "was communicated",
        ),
        (
            lambda run, r, s, i: mean(run, r, s, i).trunc(),
            "equal to the mean with its fraction cut off: it went through an integer dtype",
        ),
        (
            lambda run, r, s, i: mean(run, r, s, i) * (1 + 2.0**-23),
            "within the roundings of a factor before the sum and another after it, such as "
            "1 / sqrt(world_size): if they are meant, claim scaled",
        ),
    ],
)
def test_the_whole_cause_is_given(result: Result, cause: str) -> None:
    assert diagnose(made_run(result, world=3), 1, Claims()) == cause


@pytest.mark.parametrize(
    ("place", "cause"),
    [
        (1, "equal to the mean of one of the first micro-batches alone: gradients did not"),
        (-1, "equal to the mean of the last micro-batch alone: gradients did not accumulate"),
    ],
)
def test_names_a_micro_batch(place: int, cause: str) -> None:
    weight = ACCUMULATED.microbatch_weights[place]
    run = made_run(lambda run, r, s, i: mean(run, r, s, i) * weight, ACCUMULATED)
    assert diagnose(run, 0, Claims()).startswith(cause)
