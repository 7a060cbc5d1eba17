"""Sums as backends arrange them, in the dtype of the bucket at each hop: within the oracle's bound, and exact where it says so."""

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
    """Each part of a bucket begins at another rank and is added to at each hop; here parts are elements."""
    parts = []
    for element in range(values[0].numel()):
        order = [values[(element + hop) % len(values)][element] for hop in range(len(values))]
        total = order[0]
        for value in order[1:]:
            total = total + value
        parts.append(total)
    return torch.stack(parts)


def tree(values: list[torch.Tensor]) -> torch.Tensor:
    """Children are added to their parent, the last ones first."""
    totals = list(values)
    for child in range(len(totals) - 1, 0, -1):
        totals[(child - 1) // 2] = totals[(child - 1) // 2] + totals[child]
    return totals[0]


def divided_after(add: Sum) -> Sum:
    """A GPU divides by a number as a product with its reciprocal, both in float32 at least."""

    def mean(values: list[torch.Tensor]) -> torch.Tensor:
        wide = torch.promote_types(values[0].dtype, torch.float32)
        return (add(values).to(wide) * torch.tensor(1 / len(values), dtype=wide)).to(
            values[0].dtype
        )

    return mean


def divided_before(add: Sum) -> Sum:
    """NCCL's AVG: what each rank gives is multiplied by 1 / W in the dtype of the bucket."""
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
    assert {step: said.mismatch for step, said in comparisons.items() if said.mismatch} == {}
    margins = [said.margin for step, said in comparisons.items() if DTYPES.steps[step] == "normal"]
    assert 0 < max(margins) <= 1, "a bound that nothing comes near would find nothing"
