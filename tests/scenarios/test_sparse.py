"""Rows of embeddings: as many as drawn, most of them late, and none on a group that rests."""

import random
from itertools import pairwise

import pytest

from conformance.scenarios.gradients import sparse_rows
from conformance.scenarios.sparse import ROWS, SPARSE, draw_rows

SEEDS = range(200)


def test_the_most_rows_come_late() -> None:
    for seed in SEEDS:
        scenario = draw_rows(SPARSE, random.Random(seed))
        large = [spec for spec in scenario.params if spec.rows and spec.shape[0] >= ROWS[0]]
        assert large
        for spec in large:
            most = [max(counts) for counts in spec.rows]
            assert 8 * max(most[:5]) <= max(most[5:]) < spec.shape[0]


def test_a_group_rests_in_a_step() -> None:
    for seed in SEEDS:
        scenario = draw_rows(SPARSE, random.Random(seed))
        assert sorted(map(len, scenario.groups)) == [2, 3]
        rows_of_steps = zip(*(spec.rows for spec in scenario.params if spec.rows), strict=True)
        resting = [
            group
            for of_step in rows_of_steps
            for group in scenario.groups
            if not any(counts[rank] for counts in of_step for rank in group)
        ]
        assert resting


@pytest.mark.parametrize("seed", range(3))
def test_ranks_use_as_many_rows_as_drawn(seed: int) -> None:
    scenario = draw_rows(SPARSE, random.Random(seed))
    for spec in scenario.params:
        for step, counts in enumerate(spec.rows):
            for rank, count in enumerate(counts):
                rows = sparse_rows(spec, rank, step).tolist()
                assert len(rows) == count
                assert all(one < later for one, later in pairwise(rows))
                assert not rows or rows[0] == 0
