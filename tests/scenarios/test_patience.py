"""Runs of many steps may take longer than a deadline, which is for hangs."""

from dataclasses import replace

import pytest

from conformance.scenarios import joins_in_parts, joins_in_training
from conformance.scenarios.draws import drawn
from conformance.scenarios.hook import AT_SCALE, VALUES
from conformance.scenarios.joinable import lengths
from conformance.scenarios.model import MANY_STEPS, ON_A_DEVICE, Scenario
from conformance.scenarios.profiles import requested_profile


@pytest.mark.parametrize(("steps", "patience"), [(MANY_STEPS - 1, 0), (4000, 400)])
def test_patience_grows_with_the_steps(steps: int, patience: float) -> None:
    assert replace(VALUES, steps=("normal",) * steps).patience == patience


def test_each_number_of_simulated_ranks_has_time_of_its_own() -> None:
    """So that 30 seconds for all of them together are not too short on a busy machine."""
    assert AT_SCALE.patience >= 10 * len(AT_SCALE.simulated)


def test_a_run_on_a_device_that_makes_progress_may_take_longer() -> None:
    on_a_device = replace(VALUES, profile=requested_profile("nccl"))
    assert (VALUES.patience, on_a_device.patience) == (0, ON_A_DEVICE)


@pytest.mark.parametrize(
    "scenario",
    [*joins_in_parts.ALL, *joins_in_training.ALL],
    ids=lambda scenario: scenario.name,
)
def test_joins_with_many_inputs_have_time_for_slow_steps(scenario: Scenario) -> None:
    """A step may take a tenth of a second, as one of a small network does on a busy core."""
    few = 100
    sizes = [scenario.size] if scenario.size else [2, 3]
    for seed in range(40):
        for size in sizes:
            rows = lengths(drawn(scenario, seed), tuple(range(size)))
            assert sum(map(max, rows)) <= max(scenario.most_inputs, few)
