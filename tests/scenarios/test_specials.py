"""The places of special values that kinds of gradients name."""

import math
import random

import pytest
import torch

from conformance.scenarios.evidence import among_zeros
from conformance.scenarios.gradients import gradient
from conformance.scenarios.specials import (
    Place,
    place_of,
    put_at_place,
    with_all_elements,
    with_drawn_elements,
    without_element,
)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("nan", None),
        ("nan/1", Place(1)),
        ("nan/1/3", Place(1, 3)),
        ("inf/1/3/-1", Place(1, 3, -1)),
        ("nan/1/all", Place(1, every=1)),
        ("inf/2/3/all", Place(2, 3, every=1)),
        ("nan/1/3/80x17", Place(1, 3, count=80, number=17)),
        ("nan/1/3/zeros17", Place(1, 3, zeros=17)),
    ],
)
def test_a_kind_names_a_place(kind: str, place: Place | None) -> None:
    assert place_of(kind) == place


def test_a_place_is_widened() -> None:
    assert without_element("nan/1/3/-1") == "nan/1/3"
    assert with_drawn_elements("nan/1/3/-1", 80, 17) == "nan/1/3/80x17"
    assert with_drawn_elements("tiled", 80, 17) == "tiled"
    assert with_all_elements("nan/1/3/-1", of_one_parameter=True) == "nan/1/3/all"
    assert with_all_elements("nan/1/3/-1", of_one_parameter=False) == "nan/1/all"
    for kind in ("tiled", "nan"):
        assert with_all_elements(kind, of_one_parameter=False) == kind


@pytest.mark.parametrize(
    ("kind", "rank", "param", "count"),
    [
        ("nan/1/all", 1, 0, 12),
        ("nan/1/all", 0, 0, 0),
        ("nan/4/all", 1, 2, 12),  # of three ranks
        ("nan/1/3/all", 1, 3, 12),
        ("nan/1/3/all", 1, 2, 0),
        ("nan/1/3", 1, 3, 3),
        ("nan/1/3/7", 1, 3, 1),
        ("nan/1/3/5x17", 1, 3, 5),
        ("nan/1/3/80x17", 1, 3, 12),
    ],
)
def test_values_at_a_place(kind: str, rank: int, param: int, count: int) -> None:
    place = place_of(kind)
    assert place is not None
    values = put_at_place(kind, torch.zeros(12), place, 3, rank, param)
    assert int(values.isnan().sum()) == count


def test_infinities_have_both_signs() -> None:
    place = place_of("inf/0/all")
    assert place is not None
    values = put_at_place("inf/0/all", torch.zeros(4, dtype=torch.float64), place, 2, 0, 0)
    assert values.tolist() == [math.inf, -math.inf, math.inf, -math.inf]


@pytest.mark.parametrize("number", range(10))
def test_special_values_among_zeros(number: int) -> None:
    """Ranks have zeros of their own, and one rank has NaN in some of the other elements."""
    kind = among_zeros("nan", 1, 2, random.Random(number))
    fed = [
        gradient(kind, (100, 100), torch.float32, world=2, rank=rank, step=3, param=2)
        for rank in range(2)
    ]
    assert fed[1].isnan().any()
    assert not fed[0].isnan().any()
    assert all(int((one != 0).sum()) <= 3000 for one in fed)
    other = gradient(kind, (100, 100), torch.float32, world=2, rank=1, step=3, param=1)
    assert other.all()
    assert other.isfinite().all()
