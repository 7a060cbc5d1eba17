"""Tests of the numbers that are drawn from the session's seed."""

import json
from itertools import pairwise

import pytest

from conformance.scenarios.draws import DRAWS, drawn
from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import scenario_from_json
from conformance.scenarios.seeds import generator
from conformance.scenarios.surroundings import DEFAULT_DTYPES
from conformance.scenarios.tables import prime_from
from conformance.scenarios.values import RANGES
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import Claims
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


@pytest.mark.parametrize("seed", range(20))
def test_default_dtypes_begin_with_halves_and_have_large_buckets(seed: int) -> None:
    scenario = drawn(DEFAULT_DTYPES, seed)
    dtypes = [scenario.default_dtype(step) for step in range(len(scenario.steps))]
    assert {*dtypes[:2]} == {"float16", "bfloat16"}
    # Crafted values survive a half dtype.
    random = {dtype for dtype, kind in zip(dtypes, scenario.steps, strict=True) if kind == "normal"}
    assert random == {"float16", "bfloat16", "float64"}
    sizes = sorted(spec.shape[0] for spec in scenario.params)
    assert sizes[0] < 100
    assert sizes[-1] > 100_000


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "claims", [Claims(), Claims(rounded="float16"), Claims(dtypes=("float32",))]
)
def test_ranges_change_from_step_to_step(claims: Claims, seed: int) -> None:
    scenario = adapt_scenario(RANGES, claims, seed=seed)
    steps = range(len(scenario.steps))
    for spec in scenario.params:
        exponents = [spec.exponent_at(step) for step in steps]
        # The narrowest distance is that of 2**-13 and 2**-19.
        assert min(abs(after - before) for before, after in pairwise(exponents)) >= 6


@pytest.mark.parametrize("seed", range(20))
def test_each_step_has_several_ranges_of_each_dtype(seed: int) -> None:
    scenario = drawn(RANGES, seed)
    for dtype in ("float16", "bfloat16", "float64"):
        of_dtype = [spec for spec in scenario.params if spec.dtype == dtype]
        for step in range(len(scenario.steps)):
            exponents = sorted(spec.exponent_at(step) for spec in of_dtype)
            assert min(after - before for before, after in pairwise(exponents)) >= 6


def test_primes() -> None:
    assert [prime_from(start) for start in (1, 2, 4, 2**20, 10**6)] == [2, 2, 5, 1_048_583, 1000003]
