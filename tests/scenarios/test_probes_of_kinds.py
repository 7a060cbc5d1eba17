"""Probes of other kinds than hooks lie on both sides of their number."""

import inspect
import math

import pytest

from conformance.rules import book
from conformance.scenarios.draws import drawn
from conformance.scenarios.join_draws import drawn_lengths
from conformance.scenarios.model import Scenario, scenario_from_json
from conformance.scenarios.probes_of_kinds import (
    LARGEST_SIZE,
    LARGEST_STEP,
    probes_of_kind,
)
from conformance.subjects.kinds import KINDS
from conformance.subjects.kinds.averager import AVERAGER

OF_MODELS = ("averager", "optimizer", "strategy")
OTHERS = [name for name in KINDS if name != "hook"]
ALL = ("sizes", "counts", "steps", "worlds", "values")


def probes(kind: str, value: float, *quantities: str) -> dict[str, Scenario]:
    found = probes_of_kind(kind, value, quantities or ALL, "pkg/a.py:3")
    return {probe.scenario.name: probe.scenario for probe in found}


def sizes(scenario: Scenario) -> set[int]:
    return {math.prod(param.shape) for param in scenario.params}


@pytest.mark.parametrize("kind", [*OF_MODELS, "collective", "wrapper"])
@pytest.mark.parametrize("value", [16, 1000, 65_536, 300_007, LARGEST_SIZE])
def test_sizes_lie_on_both_sides(kind: str, value: int) -> None:
    scenario = probes(kind, value, "sizes")[f"probe_{value}_elements"]
    assert value + 1 in sizes(scenario)
    assert value > 2**18 or {value - 1, value} <= sizes(scenario)


def test_a_number_beyond_the_largest_size_may_count_bytes() -> None:
    (scenario,) = probes("wrapper", 10 * 2**20, "sizes").values()
    assert 10 * 2**18 + 1 in sizes(scenario)
    assert probes("wrapper", 4 * LARGEST_SIZE + 1, "sizes") == {}


@pytest.mark.parametrize("kind", OF_MODELS)
def test_counts_lie_beyond_the_number(kind: str) -> None:
    assert len(probes(kind, 600, "counts")["probe_600_tensors"].params) == 602


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "joinable"])
def test_steps_lie_beyond_the_number(kind: str) -> None:
    scenario = probes(kind, 800, "steps")["probe_800_steps"]
    assert len(scenario.steps) == 803
    assert kind != "wrapper" or len(scenario.params[0].shape) == 803
    assert probes(kind, LARGEST_STEP + 1, "steps") == {}


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "joinable"])
def test_a_long_probe_has_as_many_parameters_as_the_run_it_stands_in_for(kind: str) -> None:
    """Drivers and rules read drawn numbers from the shapes of parameters."""
    probe = probes(kind, 800, "steps")["probe_800_steps"]
    (stands_for,) = {
        scenario.name: drawn(scenario, 0)
        for scenario in KINDS[kind].scenarios
        if scenario.variant == probe.variant and scenario.observe.growth
    }.values()
    assert len(probe.params) == len(stands_for.params)


def test_steps_of_joins_are_shadowed_steps_and_contexts() -> None:
    found = probes("joinable", 500)
    assert list(found) == ["probe_500_steps", "probe_500_contexts"]
    shadowed, contexts = found.values()
    assert {sum(row) for row in drawn_lengths(shadowed, 2)} == {503}
    assert all(0 in row for row in drawn_lengths(shadowed, 2))
    assert len(drawn_lengths(contexts, 2)) == 503


@pytest.mark.parametrize("period", [1, 4, 300])
def test_a_long_probe_of_an_averager_averages_after_its_number(period: int) -> None:
    claimed = {"periodic": {"period": period, "warmup_steps": 0}}
    scenario = AVERAGER.adapt(probes("averager", 1_000, "steps")["probe_1000_steps"], claimed)
    assert len(scenario.steps) > 1_000 + 1
    assert any(step > 1_000 for step in range(0, len(scenario.steps), period))


def test_a_short_probe_of_an_averager_has_as_many_averages() -> None:
    claimed = {"periodic": {"period": 4, "warmup_steps": 10}}
    scenario = AVERAGER.adapt(probes("averager", 200, "steps")["probe_200_steps"], claimed)
    assert (len(scenario.steps) - 10) // 4 > 200


@pytest.mark.parametrize("kind", OTHERS)
def test_probes_belong_to_one_family_and_travel_as_json(kind: str) -> None:
    names = {scenario.name for scenario in KINDS[kind].scenarios}
    for scenario in probes(kind, 500).values():
        assert scenario.family == f"{kind}_probe"
        assert scenario.family in names
        assert scenario.kind == kind
        assert scenario_from_json(scenario.to_json()) == scenario


@pytest.mark.parametrize("kind", OTHERS)
def test_fractions_are_not_tried(kind: str) -> None:
    assert probes(kind, 0.5) == {}


def test_a_probe_that_is_adapted_again_still_averages() -> None:
    """The control is made from the subject's run, and has a schedule of its own."""
    first = {"periodic": {"period": 7, "warmup_steps": 3}}
    second = {"periodic": {"period": 4, "warmup_steps": 10}}
    for scenario in probes("averager", 600).values():
        adapted = AVERAGER.adapt(AVERAGER.adapt(scenario, first), second)
        assert {adapted.steps[step] for step in (10, 14)} <= {"crafted", "normal"}


@pytest.mark.parametrize("kind", OTHERS)
def test_every_probe_has_a_rule_that_judges_it(kind: str) -> None:
    (own_numbers,) = (rule for rule in book(kind, "cpu").values() if rule.probes)
    judges = inspect.getclosurevars(own_numbers.check).nonlocals["by_variant"]
    for value in (2, 5, 300, 1800, 70_000, LARGEST_SIZE):
        for scenario in probes(kind, value).values():
            assert scenario.variant in judges, scenario.name
