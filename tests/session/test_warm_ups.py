"""Scenarios begin with the steps of a claimed warm-up, which are judged by themselves."""

import pytest
import torch

from conformance.ranks.instruments.moments import Moments
from conformance.scenarios.model import Scenario
from conformance.scenarios.training_sizes import MANY_BUCKETS, VAST
from conformance.scenarios.values import LAYERS
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims


def adapted(claims: str, scenario: Scenario) -> Scenario:
    return adapt_scenario(scenario, parse_claims(claims), seed=0)


@pytest.mark.parametrize("claims", ["compressed", "compressed(feedback=ef21)", "unbiased"])
@pytest.mark.parametrize("scenario", [MANY_BUCKETS, VAST], ids=lambda scenario: scenario.name)
def test_no_step_of_a_warm_up_has_a_part_in_sums_of_results(
    scenario: Scenario, claims: str
) -> None:
    run = adapted(f"{claims}, warmup(3)", scenario)
    assert run.folded == "moments"
    moments = Moments(run)
    results = {0: torch.ones(run.params[0].shape).reshape(-1)}
    assert [moments.of(results, 2, step) for step in range(3)] == [{}] * 3
    assert moments.of(results, 2, 3) != {}


def test_layers_have_their_scales_in_a_warm_up_that_rounds() -> None:
    exact = adapted("compressed, warmup(2)", LAYERS)
    rounded = adapted("compressed, warmup(2, rounded=float16)", LAYERS)
    assert exact.steps[:2] == ("crafted", "crafted")
    assert rounded.steps[:2] == ("training", "training")
    assert rounded.steps[2:] == exact.steps[2:]
