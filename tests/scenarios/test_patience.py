"""Runs of many steps may take longer than a deadline, which is for hangs."""

from dataclasses import replace

import pytest

from conformance.scenarios.hook import AT_SCALE, VALUES
from conformance.scenarios.model import MANY_STEPS, ON_A_DEVICE
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
