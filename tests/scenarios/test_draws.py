"""Tests of the numbers that are drawn from the session's seed."""

import json

import pytest

from conformance.scenarios.draws import DRAWS, drawn, generator, prime_from
from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import scenario_from_json
from conformance.subjects.kinds import KINDS

SCENARIOS = {scenario.name: scenario for kind in KINDS.values() for scenario in kind.scenarios}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_gives_the_same_scenario_again_and_another_seed_another_one(name: str) -> None:
    scenario = SCENARIOS[name]
    assert drawn(scenario, 5) == drawn(scenario, 5)
    assert len({json.dumps(drawn(scenario, seed).to_json()) for seed in range(20)}) == 20


@pytest.mark.parametrize("name", DRAWS)
def test_a_drawn_scenario_travels_as_json(name: str) -> None:
    scenario = drawn(SCENARIOS[name], 3)
    assert scenario_from_json(json.loads(json.dumps(scenario.to_json()))) == scenario


def test_a_scenario_without_draws_keeps_its_numbers() -> None:
    assert drawn(VALUES, 5).params == VALUES.params
    assert drawn(VALUES, 5).session_seed == 5


def test_several_draws_for_one_scenario_are_independent() -> None:
    scenario = drawn(VALUES, 5)
    assert generator(scenario).random() == generator(scenario).random()
    assert generator(scenario).random() != generator(scenario, "again").random()


def test_primes() -> None:
    assert [prime_from(start) for start in (1, 2, 4, 2**20, 10**6)] == [2, 2, 5, 1_048_583, 1000003]
