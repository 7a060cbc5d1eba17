"""Impulses: the share of a gradient that is in the result of its own step."""

from dataclasses import replace
from functools import partial
from typing import Any

import expecttest
import pytest
import torch

from conformance.judging.oracles.impulses import require_answers
from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.impulses import ALONE, IMPULSES, SHARED
from conformance.scenarios.model import Param
from conformance.subjects.claims import parse_claims
from tests.made_runs import Result, made_run, read_failures

PARAMS = (Param((1400,)), Param((30, 30)), Param((1300,)), Param((500,)))
SCENARIO = replace(IMPULSES, params=PARAMS, steps=(SHARED, "faint", ALONE))


def judged(result: Result, claims: str = "compressed") -> Found:
    found = Found()
    require_answers(made_run(result, SCENARIO), parse_claims(claims), found)
    return found


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.05])
def test_a_part_of_the_gradient_is_an_answer(factor: float) -> None:
    found = judged(lambda *at: factor * mean(*at))
    assert not found.failures
    assert found.checks


def late(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the mean of the step before; nothing in the first step."""
    before = max(step - 1, 0)
    return mean(run, rank, before, index) * (step > 0)


def late_from_the_second(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return zeros in step 1, in which the first result would come twice."""
    return mean(run, rank, max(step - 1, 0), index) * (step != 1)


def test_a_model_too_small_for_its_delta_is_judged_as_a_whole() -> None:
    assert not judged(mean, "compressed(delta=0.01)").failures
    (failure,) = judged(late_from_the_second, "compressed(delta=0.01)").failures
    assert "step 2, all parameters: by 0 of it" in failure.actual


def late_for(*which: Any) -> torch.Tensor:
    """Return late results for some parameters; the arguments of a result come last."""
    *indices, run, rank, step, index = which
    result = late_from_the_second if index in indices else mean
    return result(run, rank, step, index)


def test_results_of_other_steps_are_described() -> None:
    results: dict[str, Result] = {
        "late": late,
        "late from the second step on": late_from_the_second,
        "late for one parameter": partial(late_for, 2),
        "late for small ones": partial(late_for, 3, 1),
        "three times as much": lambda *at: 3 * mean(*at),
        "nothing": lambda *at: 0 * mean(*at),
        "NaN": lambda *at: torch.nan * mean(*at),
    }
    said = [f"{name}\n{read_failures(judged(result).failures)}" for name, result in results.items()]
    expecttest.assert_expected_inline(
        "\n".join(said),
        """\
late
Expected: a result that lowers the squared norm of gradient plus residual, in the
    gradient's own step, by at least 0.0125 of it (an eighth of delta)
Actual: rank 0, step 0, all parameters: by 0 of it
Likely cause: the result hardly contains the gradient of its own step: it may be the
    result of an earlier step
late from the second step on
Expected: a result that lowers the squared norm of gradient plus residual, in the
    gradient's own step, by at least 0.0125 of it (an eighth of delta)
Actual: rank 0, step 2, parameter p0: by 0 of it
Likely cause: the result hardly contains the gradient of its own step: it may be the
    result of an earlier step
late for one parameter
Expected: a result that lowers the squared norm of gradient plus residual, in the
    gradient's own step, by at least 0.0125 of it (an eighth of delta)
Actual: rank 0, step 2, parameter p2: by 7.41e-09 of it
Likely cause: the result hardly contains the gradient of its own step: it may be the
    result of an earlier step
late for small ones
Expected: a result that lowers the squared norm of gradient plus residual, in the
    gradient's own step, by at least 0.0125 of it (an eighth of delta)
Actual: rank 0, step 2, small parameters: by 0 of it
Likely cause: the result hardly contains the gradient of its own step: it may be the
    result of an earlier step
three times as much
Expected: a result that lowers the squared norm of gradient plus residual, in the
    gradient's own step, by at least 0.0125 of it (an eighth of delta)
Actual: rank 0, step 0, all parameters: the result raises it, to 4 times its value
Likely cause: the result overshoots: more than the gradient and the residual come out
nothing
Expected: a result that lowers the squared norm of gradient plus residual, in the
    gradient's own step, by at least 0.0125 of it (an eighth of delta)
Actual: rank 0, step 0, all parameters: by 0 of it
Likely cause: the result hardly contains the gradient of its own step: it may be the
    result of an earlier step
NaN
Expected: finite gradients
Actual: rank 0, step 0: not finite""",
    )
