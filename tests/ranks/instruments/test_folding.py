"""Large results are folded without a loss, and have the right moments."""

import math

import torch

from conformance.ranks.instruments.folding import fold
from conformance.ranks.instruments.moments import Moments, fed_tables
from conformance.scenarios.gradients import gradient, tile
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.tables import ROWS, row_at

PERIOD = 11
TABLE = torch.arange(1.0, PERIOD + 1)
SIZES = (30, 4, 100)


def flats():
    return {index: tile(TABLE, numel, index) for index, numel in enumerate(SIZES)}


def test_what_repeats_the_table_folds_to_it():
    folded = fold(flats(), PERIOD)
    assert torch.equal(folded["low"], TABLE)
    assert torch.equal(folded["high"], TABLE)
    assert "low_at" not in folded


def test_one_wrong_element_shows_with_its_place():
    for index, numel in enumerate(SIZES):
        for element in (0, numel // 2, numel - 1):
            some = flats()
            some[index][element] += 0.5
            folded = fold(some, PERIOD)
            wrong = (folded["low"] != TABLE) | (folded["high"] != TABLE)
            column = int(wrong.nonzero())
            part = "low" if folded["low"][column] != TABLE[column] else "high"
            found, number = divmod(int(folded[f"{part}_at"][column]), ROWS)
            row = row_at(SIZES[found], PERIOD, found, number)
            assert (found, row.begin + column - row.column) == (index, element)


def test_nan_is_the_smallest_and_the_largest():
    some = flats()
    some[2][70] = math.nan
    folded = fold(some, PERIOD)
    assert folded["low"].isnan().sum() == folded["high"].isnan().sum() == 1
    column = int(folded["low"].isnan().nonzero())
    assert int(folded["low_at"][column]) // ROWS == 2


def test_places_without_elements_have_infinities():
    folded = fold({0: tile(TABLE, 4, 0)}, PERIOD)
    assert folded["low"].isinf().sum() == PERIOD - 4
    assert (folded["low"] == -folded["high"])[folded["low"].isinf()].all()


def test_moments_are_the_products_with_the_gradients():
    params = (Param((10, 4)), Param((100,)))
    scenario = Scenario("made", "", params, ("heavy_first", "zero_all"), period=PERIOD)
    results = {0: torch.randn(40), 1: torch.randn(100)}
    moments = Moments(scenario)
    first = moments.of(results, 2, 0)
    second = moments.of(results, 2, 1)
    fed = [
        gradient(
            "heavy_first",
            spec.shape,
            torch.float32,
            world=2,
            rank=1,
            step=0,
            param=index,
            period=PERIOD,
        ).reshape(-1)
        for index, spec in enumerate(params)
    ]
    along = sum(float(results[index] @ fed[index]) for index in results)
    square = sum(float(one.square().sum()) for one in results.values())
    torch.testing.assert_close(float(first["result"][:, 1].sum()), along, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(float(first["result"][:, -1].sum()), square, rtol=1e-5, atol=0)
    torch.testing.assert_close(float(second["sum"][:, -1].sum()), 4 * square, rtol=1e-5, atol=0)
    assert moments.of(results, 2, 0).keys() == {"result", "sum"}
    assert fed_tables(scenario, 2).shape == (2, PERIOD)


def test_warm_up_steps_have_no_moments_and_no_part_in_the_sum():
    kinds = ("crafted", "normal", "faint", "heavy_last")
    scenario = Scenario("made", "", (Param((40,)),), kinds, period=PERIOD)
    moments = Moments(scenario)
    of_steps = [moments.of({0: torch.ones(40)}, 2, step) for step in range(4)]
    assert of_steps[:2] == [{}, {}]
    torch.testing.assert_close(of_steps[2]["sum"], of_steps[2]["result"])
