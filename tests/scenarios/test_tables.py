"""Gradients that repeat a table, and the sizes that are drawn."""

import math
import random
from itertools import pairwise

import pytest
import torch

from conformance.scenarios import tables
from conformance.scenarios.draws import drawn
from conformance.scenarios.gradients import gradient, table, tile
from conformance.scenarios.hook import VALUES
from conformance.scenarios.training_sizes import (
    MANY_BUCKETS,
    NETWORK,
    VAST,
    draw_smaller,
    sizes_between,
)

SEEDS = range(5)


def sizes(scenario):
    return [math.prod(spec.shape) for spec in scenario.params]


@pytest.mark.parametrize("numel", [1, 7, 101, 1000])
def test_rows_cover_each_element_once(numel):
    rows = list(tables.rows(numel, 101, 3))
    covered = [element for row in rows for element in range(row.begin, row.end)]
    assert covered == list(range(numel))
    assert all(row.column + row.end - row.begin <= 101 for row in rows)
    assert [row.number for row in rows] == list(range(len(rows)))


def test_a_gradient_repeats_its_table_with_signs():
    made = gradient(
        "normal", (7, 50), torch.float32, world=2, rank=1, step=4, param=5, period=101
    ).reshape(-1)
    values = table("normal", torch.float32, world=2, rank=1, step=4, period=101)
    for row in tables.rows(350, 101, 5):
        part = values[row.column : row.column + row.end - row.begin]
        assert torch.equal(made[row.begin : row.end], part * row.sign)


def test_an_exponent_applies_from_2_to_the_24_on(monkeypatch):
    monkeypatch.setattr(tables, "BEYOND", 150)
    plain = tile(torch.arange(101.0), 400, 2)
    scaled = tile(torch.arange(101.0), 400, 2, exponent=2)
    assert torch.equal(plain[:150], scaled[:150])
    assert torch.equal(plain[150:] * 4, scaled[150:])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_network_has_the_sizes_that_its_rule_states(seed):
    network = drawn(NETWORK, seed)
    numels = sizes(network)
    assert len(numels) > 160
    assert tables.BEYOND < max(numels) < tables.BEYOND + 2 * 2**22
    assert sum(10_000 <= numel <= 4_000_000 for numel in numels) >= 24
    assert any(spec.layout == "channels_last_3d" for spec in network.params)
    before = network.params[: numels.index(max(numels))]
    small = [spec for spec in before if math.prod(spec.shape) <= 64]
    assert len(small) >= 129


@pytest.mark.parametrize("seed", SEEDS)
def test_some_bucket_lies_in_every_window(seed):
    numels = sorted(sizes(drawn(MANY_BUCKETS, seed)))
    assert 257 <= len(numels) <= 300
    assert all(more <= 1.5 * less for less, more in pairwise(numels))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_vast_matrix_has_most_of_its_energy_beyond(seed):
    vast = drawn(VAST, seed)
    beyond = max(sizes(vast)) - tables.BEYOND
    assert 16 * beyond > 3 * tables.BEYOND * 0.98


@pytest.mark.parametrize("most", [2**17, 2**20, 2**22])
@pytest.mark.parametrize("scenario", [NETWORK, MANY_BUCKETS], ids=lambda one: one.name)
def test_smaller_sizes_keep_to_their_sum(scenario, most):
    for seed in SEEDS:
        smaller = draw_smaller(scenario, most, random.Random(seed))
        assert sum(sizes(smaller)) < 1.5 * most


def test_seeds_draw_different_sizes():
    assert drawn(NETWORK, 1).params != drawn(NETWORK, 2).params
    assert drawn(NETWORK, 1) == drawn(NETWORK, 1)
    assert drawn(VALUES, 1).params == VALUES.params


def test_sizes_are_one_from_each_part_of_the_range():
    made = sizes_between(10, 1000, 20, 20, random.Random(1))
    assert made == sorted(made)
    assert made[0] < 13
    assert made[-1] > 780
