"""What the calls of a parameter have in common, in words."""

from dataclasses import replace

from conformance.scenarios.collective_conditions import MIXED_CALLS, kind_of_calls


def test_the_calls_of_a_parameter_in_words() -> None:
    scenario = replace(MIXED_CALLS, options=("all_reduce",))
    kinds = [kind_of_calls(scenario, index) for index in range(len(scenario.params))]
    assert kinds[:3] == [
        "sums of contiguous matrices",
        "averages of contiguous matrices",
        "sums of transposed matrices",
    ]
    assert kinds[-3:] == [
        "averages of tensors in channels_last",
        "sums of numbers",
        "averages of numbers",
    ]
    of_gather = replace(scenario, options=("all_gather",))
    assert kind_of_calls(of_gather, 9) == "messages of numbers"
    assert " to " in kind_of_calls(of_gather, 4)
