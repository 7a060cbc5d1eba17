"""The trainer's calls for the other of two models."""

import pytest

from conformance.scenarios.calls_for_twin import LEVELS, CallsForTwin, calls_for_twin
from conformance.scenarios.hook import TWO_MODELS
from conformance.scenarios.model import DRAINING
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims


@pytest.mark.parametrize("seed", range(20))
def test_a_state_is_loaded_while_residuals_change(seed: int) -> None:
    claims = parse_claims("compressed(delta=0.25), checkpointable, rescaled(call=rescale)")
    scenario = adapt_scenario(TWO_MODELS, claims, seed=seed)
    calls = calls_for_twin(scenario)
    assert 1 <= calls.saves_at < calls.loads_at
    assert scenario.steps[calls.loads_at] not in DRAINING
    assert len(calls.factors) > 1
    level = 1.0
    for _, factor in sorted(calls.factors.items()):
        level *= factor
        assert 1 <= level <= 2.0**LEVELS


def test_no_call_is_made_without_a_claim() -> None:
    scenario = adapt_scenario(TWO_MODELS, parse_claims("compressed(delta=0.25)"), seed=3)
    assert calls_for_twin(scenario) == CallsForTwin()
