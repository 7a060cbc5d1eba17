"""A rank's driver, and its heap, which is less like its peers' than a fork's would be."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.models.probe import parameters_apart
from conformance.ranks.rank import _DRIVERS, _driver_class
from conformance.records.recorder import Recorder
from conformance.scenarios.hook import VALUES
from conformance.subjects.kinds import HOOK, KINDS


class Idle(RankDriver):
    """A driver without any work."""

    def run(self) -> None: ...


@pytest.fixture
def idle(tmp_path: Path) -> Any:
    return Idle(VALUES, None, 0, 1, tmp_path, 1.0, Recorder(tmp_path))


def test_every_kind_has_a_driver() -> None:
    assert {*_DRIVERS} == {HOOK, *KINDS}
    assert all(issubclass(_driver_class(kind), RankDriver) for kind in _DRIVERS)


def test_an_activity_ends_with_its_block(idle: Idle) -> None:
    with idle.doing("state_dict"):
        with idle.doing("kit"):
            assert idle.activity == "kit"
        assert idle.activity == "state_dict"
    assert idle.activity == "kit"


def test_an_error_is_attributed_to_the_innermost_activity(idle: Idle, tmp_path: Path) -> None:
    error = ValueError("of the subject")

    def fail() -> None:
        with idle.doing("make"), idle.doing("state_dict"):
            raise error

    with pytest.raises(ValueError, match="of the subject"):
        fail()
    idle.failed(error)
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["where"], event["type"]) == ("state_dict", "ValueError")


@pytest.mark.parametrize("count", [2, 3, 4, 9, 33])
def test_ranks_disagree_on_every_order_that_comes_from_memory(count: int) -> None:
    """They disagree on the order of addresses, and on the order of a set of three or more."""
    orders = []
    for rank in (0, 1, 2):
        parameters = parameters_apart(count, rank)
        indices = {parameter: index for index, parameter in enumerate(parameters)}
        assert len(indices) == count
        in_sets = []
        for made in (parameters, parameters[::-1]) if count > 2 else ():
            in_sets.append([indices[one] for one in set(made)])
        orders.append([[indices[one] for one in sorted(parameters, key=id)], *in_sets])
    for here, there in itertools.pairwise(orders):
        assert all(one != other for one, other in zip(here, there, strict=True))
