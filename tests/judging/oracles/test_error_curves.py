"""Errors by step for the pictures of a report, on runs made without ranks."""

from dataclasses import replace

import pytest
import torch

from conformance.judging.oracles.error_curves import (
    POINTS,
    bin_labels,
    error_curve,
    errors_at_scale,
)
from conformance.judging.oracles.mean import mean
from conformance.records.run import Run
from conformance.scenarios.gradients import at_scale
from conformance.scenarios.hook import AT_SCALE, VALUES
from conformance.subjects.claims import Claims, parse_claims
from tests.made_long_runs import long_run
from tests.made_runs import event, made_run


def test_a_right_run_has_no_error() -> None:
    curve = error_curve(made_run(), Claims())
    assert curve is not None
    assert len(curve.points) == curve.steps == len(VALUES.steps)
    assert all(point.error <= (point.bound or 0) for point in curve.points)
    assert curve.bins[-1] == 0
    assert len(curve.bins) == len(bin_labels())


def test_a_wrong_step_is_above_its_bound() -> None:
    def wrong_in_step_4(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index) * (1.5 if step == 4 else 1)

    curve = error_curve(made_run(wrong_in_step_4), Claims())
    assert curve is not None
    above = [point.at for point in curve.points if point.error > (point.bound or 0)]
    assert above == [4]
    assert curve.bins[-1] > 0


@pytest.mark.parametrize(("claims", "above"), [("rounded(float16)", []), ("exact", [4])])
def test_an_overflow_that_the_claims_allow_is_no_error(claims: str, above: list[int]) -> None:
    """The values of step 4 are too large for float16."""

    def overflows(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        right = mean(run, rank, step, index)
        return right.to(torch.float16).to(right.dtype) if step == 4 else right

    steps = (*("crafted",) * 4, "wide", "crafted")
    run = made_run(overflows, replace(VALUES, steps=steps))
    curve = error_curve(run, parse_claims(claims))
    assert curve is not None
    assert [point.at for point in curve.points if point.error > (point.bound or 0)] == above


def test_lossy_results_of_single_steps_have_no_curve() -> None:
    assert error_curve(made_run(), parse_claims("compressed")) is None


@pytest.mark.parametrize("share", [1.0, 0.97])
def test_errors_among_simulated_ranks(share: float) -> None:
    run = made_run(scenario=AT_SCALE, world=1)
    for size in (3, 2, 4, 1024):
        run.ranks[0].events.append(event("simulated", 0, size=size, alike=True))
        run.ranks[0].tensors[f"at scale/{size}"] = (at_scale(size).mean(0) * share).float()
    curve = errors_at_scale(run, Claims())
    assert curve is not None
    assert [point.at for point in curve.points] == [2, 3, 4, 1024]
    assert all(abs(point.error - (1 - share)) < 1e-6 for point in curve.points)
    bounds = [point.bound for point in curve.points]
    assert all(bounds)
    assert bounds == sorted(bounds, key=lambda bound: bound or 0)


@pytest.mark.parametrize(
    "claims",
    ["exact", "compressed", "compressed(feedback=False, delta=0.5)", "compressed(feedback=ef21)"],
)
def test_a_long_run_is_thinned_to_its_worst_steps(claims: str) -> None:
    run, parsed = long_run(claims, lambda step, index, fed: fed.mean(0, True).expand_as(fed))
    curve = error_curve(run, parsed)
    assert curve is not None
    assert len(curve.points) <= POINTS < curve.steps
    assert all(point.error <= (point.bound or 0) for point in curve.points)
