"""The learning rates of a long run."""

import itertools

import pytest

from conformance.scenarios.learning_rates import (
    FIRST_RATES,
    LOADS,
    RISE,
    STRETCH,
    learning_rates,
    optimizer_loads,
    rate_of_short_runs,
)
from conformance.scenarios.long_runs import ENDURANCE
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims


def _rates(claims: str, seed: int) -> tuple[float, ...]:
    return learning_rates(adapt_scenario(ENDURANCE, parse_claims(claims), seed=seed))


@pytest.mark.parametrize("seed", range(20))
def test_rates_of_fused_hooks_rest_and_rise_once(seed: int) -> None:
    rates = _rates("fused(SGD, lr=0.1)", seed)
    rests = [step for step, rate in enumerate(rates) if rate == 0]
    assert STRETCH[0] <= len(rests) <= STRETCH[1]
    assert rests == list(range(rests[0], rests[-1] + 1))
    rises = [
        (step, rate / before)
        for step, (before, rate) in enumerate(itertools.pairwise(rates))
        if 0 < before < rate
    ]
    assert len(rises) == 1
    step, factor = rises[0]
    assert RISE[0] <= factor <= RISE[1] + 1e-9
    assert len(rates) // 8 <= step + 1 < len(rates) * 7 // 8


@pytest.mark.parametrize("seed", range(20))
def test_optimizers_of_fused_hooks_load_their_state_before_rates_rise(seed: int) -> None:
    scenario = adapt_scenario(ENDURANCE, parse_claims("fused(SGD, lr=0.1)"), seed=seed)
    rates = learning_rates(scenario)
    loads = optimizer_loads(scenario)
    assert 1 <= len(loads) <= LOADS[1]
    assert loads[0] > 0
    assert loads[-1] < len(rates) * 7 // 8
    assert any(0 < rates[step - 1] < rates[step] for step in range(loads[0], len(rates)))


def test_optimizers_of_other_hooks_load_nothing() -> None:
    assert optimizer_loads(adapt_scenario(ENDURANCE, parse_claims("exact"), seed=3)) == ()


@pytest.mark.parametrize("claims", ["local", "compressed(delta=0.25)"])
def test_rates_of_other_hooks_fall(claims: str) -> None:
    rates = _rates(claims, 3)
    assert all(0 < rate < before for before, rate in itertools.pairwise(rates))


def test_rates_of_lossy_fused_hooks_are_never_zero() -> None:
    rates = _rates("fused(SGD, lr=0.1), compressed(delta=0.25)", 3)
    assert min(rates) > 0
    assert any(rate > before for before, rate in itertools.pairwise(rates))


def test_all_short_runs_of_a_session_have_one_rate() -> None:
    one = adapt_scenario(ENDURANCE, parse_claims("exact"), seed=3)
    other = adapt_scenario(ENDURANCE, parse_claims("exact"), seed=4)
    assert rate_of_short_runs(one) != rate_of_short_runs(other)
    assert FIRST_RATES[0] <= rate_of_short_runs(one) <= FIRST_RATES[1]
