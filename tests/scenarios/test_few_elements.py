"""Steps whose gradients lie in a few elements."""

from dataclasses import replace

from conformance.scenarios.few_elements import in_each_parameter
from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import Param


def test_steps_do_not_grow_with_the_square_of_the_number_of_buckets() -> None:
    for count, steps in ((5, 11), (16, 33), (257, 33)):
        scenario = replace(VALUES, params=(Param((7,)),) * count)
        assert len(in_each_parameter(scenario, delta=0.5)) == steps
