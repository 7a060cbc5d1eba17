"""Tests of the drawn ranks, nodes and groups of section 24."""

from collections import Counter
from itertools import accumulate, pairwise

import pytest

from conformance.scenarios import kinds_in_clusters
from conformance.scenarios.cluster_draws import WIDE_SIZES
from conformance.scenarios.clusters import (
    BYSTANDERS,
    CLUSTERS,
    EQUAL_GROUPS,
    EQUAL_NODES,
    TWO_GROUPS,
    UNEQUAL_NODES,
    UNEVEN_GROUPS,
    WIDE_GROUPS,
    with_groups_of,
)
from conformance.scenarios.draws import drawn
from conformance.scenarios.hook import AT_SCALE
from conformance.scenarios.model import Scenario
from conformance.scenarios.sparse import SPARSE
from conformance.scenarios.training_sizes import SMALLEST
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import Claims, default_claims

SEEDS = range(200)


def groups_of(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    return scenario.groups or scenario.twin_groups


def test_each_session_has_an_odd_size_and_one_that_is_far_from_a_power_of_two() -> None:
    sizes = Counter(
        (drawn(UNEQUAL_NODES, seed).size, drawn(EQUAL_NODES, seed).size) for seed in SEEDS
    )
    assert set(sizes) == {(5, 6), (7, 6), (7, 8)}
    assert min(sizes.values()) > 25


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_and_groups_have_the_ranks_of_the_run(seed: int) -> None:
    unequal = drawn(UNEQUAL_NODES, seed)
    equal = drawn(EQUAL_NODES, seed)
    assert (sum(unequal.nodes), sum(equal.nodes)) == (unequal.size, equal.size)
    assert len(set(unequal.nodes)) > 1
    assert len(set(equal.nodes)) == 1
    assert len(equal.nodes) > 1
    for scenario in (UNEVEN_GROUPS, TWO_GROUPS, BYSTANDERS):
        one = drawn(scenario, seed)
        assert sum(one.nodes) in (0, one.own_size)
        ranks = sorted(rank for group in groups_of(one) for rank in group)
        assert ranks == list(range(one.own_size))
    two_layouts = drawn(EQUAL_GROUPS, seed)
    ranks = set(range(two_layouts.own_size))
    for groups in (two_layouts.groups, two_layouts.twin_groups):
        assert {rank for group in groups for rank in group} == ranks
        assert {len(group) for group in groups} == {len(ranks) // 2}
    assert not set(two_layouts.groups) & set(two_layouts.twin_groups)
    for end in (0, -1):
        first, second = (
            {group[end] for group in groups}
            for groups in (two_layouts.groups, two_layouts.twin_groups)
        )
        assert first - second
        assert second - first
    uneven = drawn(UNEVEN_GROUPS, seed).groups[0]
    assert len({after - before for before, after in pairwise(uneven)}) > 1


def ranks_of_nodes(group: tuple[int, ...], nodes: tuple[int, ...]) -> list[int]:
    """Return how many ranks of a group each node has."""
    ends = [*accumulate(nodes)]
    return [
        sum(end - size <= rank < end for rank in group)
        for end, size in zip(ends, nodes, strict=True)
    ]


def test_groups_have_unequally_many_ranks_of_equal_nodes() -> None:
    layouts = set()
    for seed in SEEDS:
        scenario = drawn(UNEVEN_GROUPS, seed)
        larger, smaller = (ranks_of_nodes(group, scenario.nodes) for group in scenario.groups)
        assert len(set(scenario.nodes)) == 1
        assert len(set(larger)) > 1
        assert 0 in smaller
        layouts.add((len(scenario.nodes), scenario.groups))
    assert len(layouts) > 10
    of_world = [drawn(TWO_GROUPS, seed) for seed in SEEDS]
    equal = [one for one in of_world if len(set(one.nodes)) == 1]
    assert 50 < len(equal) < 150
    assert all(sorted(ranks_of_nodes(one.twin_groups[0], one.nodes)) == [1, 2] for one in equal)
    assert all(len(set(drawn(EQUAL_GROUPS, seed).nodes)) == 2 for seed in SEEDS)


@pytest.mark.parametrize("seed", range(20))
def test_a_range_of_sizes_that_spans_such_a_factor_has_a_bucket_in_each_dtype(
    seed: int,
) -> None:
    params = drawn(WIDE_GROUPS, seed).params
    for dtype, (largest, _) in WIDE_SIZES.items():
        sizes = [spec.shape[0] for spec in params if spec.dtype == dtype]
        least = SMALLEST
        while least * 36 <= largest:
            assert any(least <= size <= 36 * least for size in sizes)
            if 6 * least <= 20_000:
                assert any(least <= size <= 6.3 * least for size in sizes)
            least *= 2


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_embeddings_come_from_two_nodes(seed: int) -> None:
    scenario = adapt_scenario(SPARSE, Claims(), seed=seed)
    assert sum(scenario.nodes) == scenario.own_size == 5
    (larger,) = (group for group in scenario.groups if len(group) == 3)
    assert {1, 2} <= set(ranks_of_nodes(larger, scenario.nodes)) <= {0, 1, 2}
    of_world = adapt_scenario(SPARSE, Claims(world_only=True), seed=seed)
    assert (of_world.own_size, of_world.nodes) == (3, (1, 2))


def test_idle_ranks_have_no_inputs() -> None:
    scenario = drawn(BYSTANDERS, 1)
    inputs = [scenario.inputs_of(rank, 3) for rank in range(3)]
    assert [count == 0 for count in inputs] == [rank in scenario.idle for rank in range(3)]


@pytest.mark.parametrize("least", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("scenario", CLUSTERS, ids=lambda scenario: scenario.name)
def test_groups_are_as_large_as_the_subject_claims_to_need(scenario: Scenario, least: int) -> None:
    adapted = adapt_scenario(scenario, Claims(min_world_size=least))
    groups = groups_of(adapted)
    assert min(map(len, groups or (range(adapted.size),))) >= least
    assert sorted(rank for group in groups for rank in group) in ([], [*range(adapted.own_size)])
    if adapted.nodes:
        assert sum(adapted.nodes) == adapted.own_size


def test_a_group_without_a_constant_distance_stays_one() -> None:
    first = with_groups_of(UNEVEN_GROUPS, 4).groups[0]
    assert len({after - before for before, after in pairwise(first)}) > 1


def test_a_simulation_begins_with_sizes_that_real_ranks_have() -> None:
    simulated = drawn(AT_SCALE, 3).simulated
    assert simulated[:3] == (3, 2, 4)
    assert {5, 6, 7, 8, 12, *range(16, 97, 8), 1024} < set(simulated)
    assert len(simulated) >= 24
    least = adapt_scenario(AT_SCALE, Claims(min_world_size=3)).simulated
    assert least[:3] == (4, 3, 5)
    assert len(set(least)) == len(least)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("scenario", kinds_in_clusters.ALL, ids=lambda scenario: scenario.name)
def test_other_kinds_have_five_to_eight_ranks(scenario: Scenario, seed: int) -> None:
    one = drawn(scenario, seed)
    assert 5 <= one.own_size <= 8
    assert sum(one.nodes) == one.own_size


@pytest.mark.parametrize("largest", [2, 3, 4])
@pytest.mark.parametrize("scenario", kinds_in_clusters.AVERAGER, ids=lambda scenario: scenario.name)
def test_a_hierarchical_averager_has_the_ranks_of_its_largest_group(
    scenario: Scenario, largest: int
) -> None:
    claims = default_claims("averager", {"period_group_size_dict": {2: 2, 4: largest}})
    adapted = adapt_scenario(scenario, claims)
    assert (adapted.own_size, adapted.groups) == (largest, ())
    assert sum(adapted.nodes) == largest
