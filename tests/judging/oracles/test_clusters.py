"""Tests of the results of twins, of the causes that nodes reveal, and of the simulation's bound."""

from dataclasses import replace

import pytest
import torch

from conformance.judging.oracles.clusters import cause_in_nodes, share_of_bound, twins_of
from conformance.judging.oracles.lossy import require_same_bits
from conformance.judging.oracles.mean import compare, mean
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.clusters import TWO_GROUPS, UNEQUAL_NODES
from conformance.scenarios.gradients import TWIN_FACTOR, TWIN_OFFSET, gradient
from conformance.subjects.claims import Claims

NODES = ((0, 1, 2), (3, 4))


def run_of(result: object) -> Run:
    """Return a run of one step on five ranks, whose results a function of rank and index makes."""
    scenario = replace(UNEQUAL_NODES, steps=("crafted",))
    run = Run(scenario, 5, [RankRecord(rank) for rank in range(5)])
    for rank in range(5):
        for index in range(len(scenario.params)):
            run.ranks[rank].tensors[f"0/grad/p{index}"] = result(run, rank, index)  # type: ignore[operator]
    return run


def over(run: Run, ranks: tuple[int, ...], index: int) -> torch.Tensor:
    return torch.stack([run.fed(rank, 0, index) for rank in ranks]).mean(0)


CASES = {
    "a node with fewer ranks counts as much": lambda run, rank, index: (
        (over(run, NODES[0], index) + over(run, NODES[1], index)) / 2
    ),
    "nodes exchange nothing": lambda run, rank, index: over(run, NODES[rank > 2], index),
    "it hands nothing to the others": lambda run, rank, index: (
        mean(run, rank, 0, index) if rank in (0, 3) else run.fed(rank, 0, index)
    ),
    "the others take no part": lambda run, rank, index: over(run, (0, 3), index),
    "equal to the mean over the first 4 ranks": lambda run, rank, index: over(
        run, (0, 1, 2, 3), index
    ),
    "divided by all": lambda run, rank, index: over(run, (0, 1, 2, 3), index) * 4 / 5,
}


@pytest.mark.parametrize("cause", CASES)
def test_names_the_mistake_of_a_hierarchy(cause: str) -> None:
    assert cause in cause_in_nodes(run_of(CASES[cause]), 0)


def test_names_nothing_for_other_mistakes() -> None:
    assert cause_in_nodes(run_of(lambda run, rank, index: mean(run, rank, 0, index) * 3), 0) == ""


def twin_run(factor: float) -> Run:
    """Return a run whose twins have ``factor`` times the means over their groups."""
    scenario = replace(TWO_GROUPS, steps=("crafted",))
    run = Run(scenario, 3, [RankRecord(rank) for rank in range(3)])
    for group in scenario.twin_groups:
        for index, spec in enumerate(scenario.params):
            fed = [
                gradient(
                    "crafted",
                    spec.shape,
                    torch.float32,
                    world=len(group),
                    rank=rank,
                    step=TWIN_OFFSET,
                    param=index,
                )
                for rank in group
            ]
            for rank in group:
                result = torch.stack(fed).mean(0) * TWIN_FACTOR * factor
                run.ranks[rank].tensors[f"0/twin/p{index}"] = result
    return run


def test_twins_get_the_means_over_their_own_groups() -> None:
    twins = list(twins_of(twin_run(1.0)))
    assert [one.members for one in twins] == list(TWO_GROUPS.twin_groups)
    for one in twins:
        comparison = compare(one, 0, Claims())
        assert comparison.mismatch is None
        assert comparison.checked > 0


def test_a_wrong_twin_is_found() -> None:
    for one in twins_of(twin_run(1.001)):
        assert compare(one, 0, Claims()).mismatch is not None


def test_twins_of_a_lossy_subject_are_compared_with_each_other() -> None:
    """The gradients of their models, on other groups, have other bits."""
    run = twin_run(1.0)
    first, second = run.scenario.twin_groups[0]
    run.ranks[second].tensors["0/grad/p0"] = torch.ones(5, 3)
    for is_alike in (True, False):
        found = Found()
        assert require_same_bits(next(twins_of(run)), Claims(), found) is is_alike
        run.ranks[first].tensors["0/twin/p0"] += 1


def test_the_bound_of_a_simulation_decides_as_its_module_states() -> None:
    for claims, last in (
        (Claims(), None),
        (Claims(rounded="bfloat16"), 84),
        (Claims(rounded="float16"), 681),
    ):
        decided = [size for size in range(5, 1025) if share_of_bound(size, claims) is not None]
        assert decided == list(range(5, last or 1025))
