"""Runs of many steps may take longer than a deadline, which is for hangs."""

from dataclasses import replace

import pytest

from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import MANY_STEPS


@pytest.mark.parametrize(("steps", "patience"), [(MANY_STEPS - 1, 0), (4000, 400)])
def test_patience_grows_with_the_steps(steps: int, patience: float) -> None:
    assert replace(VALUES, steps=("normal",) * steps).patience == patience
