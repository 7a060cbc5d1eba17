"""Parameters of other dtypes than float32: some ranks leave them out, or buckets are alike."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.clusters import UNUSED_GROUPS
from conformance.scenarios.hook import SCHEDULES, UNUSED
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.training_sizes import sizes_between

_HALVES = ("float16", "bfloat16")
_FLOATS = (*_HALVES, "float32", "float64")


def add_other_dtypes(scenario: Scenario) -> Scenario:
    """Return one of the scenarios ``WITH_OTHER_DTYPES`` with parameters of other dtypes."""
    return WITH_OTHER_DTYPES[scenario.name](scenario)


def _that_some_leave_out(scenario: Scenario) -> Scenario:
    """Add four parameters, in a drawn order: of float16, bfloat16, float64, and one half dtype
    again; each is a matrix or a vector of 2 to 600 elements.

    Of four that follow one another, each has a step out of four in which one rank alone uses it
    (``gradients.uses``).
    """
    numbers = generator(scenario, "dtypes")
    dtypes = [*_HALVES, "float64", numbers.choice(_HALVES)]
    numbers.shuffle(dtypes)
    more = tuple(Param(_shape(numbers), dtype) for dtype in dtypes)
    return replace(scenario, params=(*scenario.params, *more))


def _in_equal_buckets(scenario: Scenario) -> Scenario:
    """Add two or three parameters of one size for each of float16, bfloat16, float32 and float64,
    at any place: of 33 to 2**17 elements, so that each has a bucket of its own. One size comes from
    each of four equal parts of the range of logarithms. They are alike in all schedules.
    """
    numbers = generator(replace(scenario, name="schedules"), "dtypes")
    params = list(scenario.params)
    sizes = sizes_between(33, 1 << 17, len(_FLOATS), len(_FLOATS), numbers)
    numbers.shuffle(sizes)
    for dtype, size in zip(_FLOATS, sizes, strict=True):
        for _ in range(numbers.randint(2, 3)):
            params.insert(numbers.randint(0, len(params)), Param((size,), dtype))
    return replace(scenario, params=tuple(params))


def _shape(numbers: random.Random) -> tuple[int, ...]:
    rows = numbers.randint(2, 24)
    return (rows, numbers.randint(2, 25)) if numbers.random() < 0.5 else (rows,)


WITH_OTHER_DTYPES: Mapping[str, Callable[[Scenario], Scenario]] = {
    UNUSED.name: _that_some_leave_out,
    UNUSED_GROUPS.name: _that_some_leave_out,
    **dict.fromkeys((one.name for one in SCHEDULES), _in_equal_buckets),
}
