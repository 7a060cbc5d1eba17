"""Right sums over micro-batches and ranks lie within the bound, in every dtype and any order."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from conformance.judging.oracles.averager_records import same
from conformance.judging.oracles.strategy import fed_part, largest_error, right
from conformance.records.run import Run
from conformance.scenarios.conditions_together import STRATEGY
from conformance.scenarios.draws import drawn
from conformance.scenarios.strategy_schedule import batches

SPECIAL = next(scenario for scenario in STRATEGY if scenario.name == "strategy_special_together")

Values = list[list[torch.Tensor]]  # of each micro-batch, on each rank


def divide_first(values: Values) -> torch.Tensor:
    """Accumulate, divide and sum, as DDP does."""
    size = len(values[0])
    own = [_sum(list(batch)) for batch in zip(*values, strict=True)]
    return _sum([part / size for part in own])


def multiply_first(values: Values) -> torch.Tensor:
    """Accumulate, multiply by 1 / W and sum."""
    size = len(values[0])
    own = [_sum(list(batch)) for batch in zip(*values, strict=True)]
    return _sum([part * (1 / size) for part in own])


def average_in_every_batch(values: Values) -> torch.Tensor:
    """Average what has accumulated again in each micro-batch."""
    size = len(values[0])
    mean = torch.zeros_like(values[0][0])
    for batch in values:
        mean = _sum([(mean + part) / size for part in batch])
    return mean


def divide_last(values: Values) -> torch.Tensor:
    """Accumulate, sum and divide; sums of float16 near its limit overflow."""
    size = len(values[0])
    own = [_sum(list(batch)) for batch in zip(*values, strict=True)]
    return _sum(own) / size


def _sum(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for _, value in pairwise(values):
        total = total + value
    return total


AVERAGES: list[Callable[[Values], torch.Tensor]] = [
    divide_first,
    multiply_first,
    average_in_every_batch,
    divide_last,
]


@pytest.mark.parametrize("size", range(2, 9))
def test_right_sums_are_within_the_bound(size: int) -> None:
    for seed in range(3):
        scenario = replace(drawn(SPECIAL, seed), size=size)
        run = Run(scenario, size, [])
        for step, kind in enumerate(scenario.steps):
            for index, spec in enumerate(scenario.params):
                dtype = getattr(torch, spec.dtype)
                values = [
                    [fed_part(run, rank, (step, batch), index).to(dtype) for rank in range(size)]
                    for batch in range(batches(scenario, step))
                ]
                wanted = right(run, 0, step, index)
                bound = largest_error(run, 0, step, index)
                for average in AVERAGES:
                    if kind == "limit" and spec.dtype == "float16" and average is divide_last:
                        continue
                    got = average(values).double()
                    is_right = same(got, wanted) | ((got - wanted).abs() <= bound)
                    assert is_right.all(), (average.__name__, seed, step, index)


def test_sums_of_float32_are_exact() -> None:
    for size in (2, 3, 4, 5, 6, 8):
        run = Run(replace(drawn(SPECIAL, 0), size=size), size, [])
        step = run.scenario.steps.index("crafted")
        for index, spec in enumerate(run.scenario.params):
            if spec.dtype == "float32":
                assert not largest_error(run, 0, step, index).any()
