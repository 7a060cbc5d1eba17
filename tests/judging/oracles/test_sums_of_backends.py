"""Tests of the oracle's bound with the sums of real backends.

Each sum rounds to the bucket's dtype at every hop. Means of random gradients have to be within the
oracle's bound, and means of crafted gradients exact.
"""

from collections.abc import Callable

import pytest
import torch

from conformance.judging.oracles.mean import compare
from conformance.records.run import Run
from conformance.scenarios.hook import DTYPES
from conformance.subjects.claims import Claims
from tests.made_runs import made_run

Sum = Callable[[list[torch.Tensor]], torch.Tensor]


def ring(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of a ring: each part of a bucket begins at another rank and grows at each hop.

    The parts are single elements here.
    """
    parts = []
    for element in range(values[0].numel()):
        order = [values[(element + hop) % len(values)][element] for hop in range(len(values))]
        total = order[0]
        for value in order[1:]:
            total = total + value
        parts.append(total)
    return torch.stack(parts)


def tree(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of a tree: children are added to their parent, the last ones first."""
    totals = list(values)
    for child in range(len(totals) - 1, 0, -1):
        totals[(child - 1) // 2] = totals[(child - 1) // 2] + totals[child]
    return totals[0]


def divided_after(add: Sum) -> Sum:
    """Return the mean that a GPU computes: a product with the reciprocal, in float32 at least."""

    def mean(values: list[torch.Tensor]) -> torch.Tensor:
        wide = torch.promote_types(values[0].dtype, torch.float32)
        return (add(values).to(wide) * torch.tensor(1 / len(values), dtype=wide)).to(
            values[0].dtype
        )

    return mean


def divided_before(add: Sum) -> Sum:
    """Return NCCL's AVG: every rank multiplies by 1 / W in the dtype of the bucket."""
    return lambda values: add(
        [value * torch.tensor(1 / len(values), dtype=value.dtype) for value in values]
    )


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("add", [ring, tree], ids=["ring", "tree"])
@pytest.mark.parametrize("divided", [divided_after, divided_before], ids=["after", "before"])
def test_is_within_the_bound(divided: Callable[[Sum], Sum], add: Sum, world: int) -> None:
    mean = divided(add)

    def result(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        dtype = getattr(torch, run.scenario.params[index].dtype)
        return mean([run.fed(other, step, index).to(dtype) for other in range(run.world)])

    run = made_run(result, DTYPES, world)
    comparisons = {step: compare(run, step, Claims()) for step in range(len(DTYPES.steps))}
    assert {
        step: comparison.mismatch for step, comparison in comparisons.items() if comparison.mismatch
    } == {}
    margins = [
        comparison.margin
        for step, comparison in comparisons.items()
        if DTYPES.steps[step] == "normal"
    ]
    assert 0 < max(margins) <= 1, "a bound far above every error would find nothing"
