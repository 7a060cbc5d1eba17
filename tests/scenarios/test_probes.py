"""Probes lie on both sides of their number, and stay within limits."""

import math

import pytest

from conformance.scenarios.hook import LARGE, VALUES
from conformance.scenarios.model import Param, Scenario, scenario_from_json
from conformance.scenarios.probes import (
    LARGEST_SIZE,
    PROBE,
    Probe,
    judged_as,
    probe_of_dtype,
    probes_of_number,
    steps_after,
    steps_until_empty,
    with_residuals_emptied,
)

ALL = ("sizes", "counts", "steps", "worlds", "values")


def probes(value: float, *quantities: str) -> dict[str, Probe]:
    found = probes_of_number(value, quantities or ALL, "pkg/a.py:3", [value])
    return {probe.scenario.name: probe for probe in found}


def sizes(scenario: Scenario) -> set[int]:
    return {math.prod(param.shape) for param in scenario.params}


@pytest.mark.parametrize("value", [16, 1000, 65_536, 300_007, 4_000_000, LARGEST_SIZE])
def test_sizes_lie_on_both_sides(value: int) -> None:
    scenario = probes(value, "sizes")[f"probe_{value}_elements"].scenario
    assert value + 1 in sizes(scenario)
    assert value > 2**18 or {value - 1, value} <= sizes(scenario)
    assert scenario.ddp.bucket_cap_mb * 2**20 <= 1, "each parameter has a bucket of its own"


def test_counts_steps_and_worlds_lie_beyond_the_number() -> None:
    found = probes(6)
    assert len(found["probe_6_tensors"].scenario.params) == 8
    assert len(found["probe_6_buckets"].scenario.params) == 8
    assert len(found["probe_6_steps"].scenario.steps) == 9
    worlds = [
        probe.world for probe in probes_of_number(6, ALL, "", []) if "ranks" in probe.scenario.name
    ]
    assert worlds == [6, 7]


def test_steps_feed_the_other_sizes_too() -> None:
    probe, _ = probes_of_number(40, ("steps",), "", [40, 2_000, 10**6])
    assert {41, 2001} <= sizes(probe.scenario)
    assert 10**6 + 1 not in sizes(probe.scenario)


def test_values_lie_far_on_both_sides() -> None:
    (probe,) = probes_of_number(1e-5, ALL, "", [])
    exponents = {param.exponent for param in probe.scenario.params}
    assert 2.0 ** max(exponents) > 8e-5
    assert 2.0 ** min(exponents) < 1e-6
    assert set(probe.scenario.steps) == {"normal"}, "crafted values are exact only near 1"
    assert probe.scenario.name.isidentifier()


@pytest.mark.parametrize(
    ("value", "quantities", "expected"),
    [
        (LARGEST_SIZE, ("sizes",), True),
        (LARGEST_SIZE + 1, ("sizes",), False),
        (4096, ("steps",), True),
        (4097, ("steps",), False),
        (9, ("worlds",), False),
        (0.5, ("sizes",), False),
        (0.5, ("values",), True),
    ],
)
def test_range(value: float, quantities: tuple[str, ...], expected: bool) -> None:
    assert bool(probes(value, *quantities)) is expected


@pytest.mark.parametrize(
    ("probe", "plain", "with_residuals"),
    [
        (probes(1000, "sizes")["probe_1000_elements"], VALUES, VALUES),
        (probes(30_000, "sizes")["probe_30000_elements"], VALUES, LARGE),
        (probes(300_007, "sizes")["probe_300007_elements"], LARGE, LARGE),
        (probe_of_dtype("bfloat16", ""), VALUES, LARGE),
    ],
)
def test_a_probe_is_judged_as_a_plain_or_as_a_large_run(
    probe: Probe, plain: Scenario, with_residuals: Scenario
) -> None:
    assert judged_as(probe.scenario, holds_back=False) is plain
    assert judged_as(probe.scenario, holds_back=True) is with_residuals


def test_the_residual_of_one_large_parameter_is_emptied() -> None:
    probe, emptied = with_residuals_emptied(probes(30_000, "sizes")["probe_30000_elements"])
    assert steps_until_empty(probe.scenario) == 0
    assert emptied.scenario.params == (Param((30_001,)),)
    assert judged_as(emptied.scenario, holds_back=True) is VALUES
    assert steps_until_empty(emptied.scenario) > math.sqrt(30_001)


@pytest.mark.parametrize("size", [1000, 2**17])
def test_residuals_of_small_and_of_huge_parameters_have_no_run_of_their_own(size: int) -> None:
    (probe,) = probes(size, "sizes").values()
    assert list(with_residuals_emptied(probe)) == [probe]


def test_probes_belong_to_one_family_and_travel_as_json() -> None:
    for probe in probes(5).values():
        assert probe.scenario.family == PROBE.name
        assert scenario_from_json(probe.scenario.to_json()) == probe.scenario
    assert VALUES.family == VALUES.name


def test_late_steps_have_parameters_beyond_the_larger_sizes() -> None:
    found = probes_of_number(1_800, ("steps",), "pkg/a.py:3", [1_800, 50_000, 2_000, 10**8])
    _, late = found
    assert late.by_step
    assert late.scenario.name == "probe_1800_steps_at_sizes"
    assert late.scenario.unrecorded_steps == 1_799
    assert len(late.scenario.steps) == 4
    assert next(param.shape for param in late.scenario.params) == (50_001,)
    assert (10**8 + 1,) not in [param.shape for param in late.scenario.params]


def test_local_results_meet_after_late_steps() -> None:
    (steps,) = probes_of_number(400, ("steps",), "pkg/a.py:3", [400])
    assert steps_after(steps.scenario, 0) == 201
    assert steps_after(steps.scenario, 7) == 8
    (sizes,) = probes_of_number(400, ("sizes",), "pkg/a.py:3", [400])
    assert steps_after(sizes.scenario, 7) == 0
