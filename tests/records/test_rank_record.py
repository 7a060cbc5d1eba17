"""The record of a rank: parts that a rule reads and that are not there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conformance.records.files import EVENTS, TENSORS
from conformance.records.rank_record import IncompleteRecord, RankRecord, read_rank


@pytest.fixture
def record(tmp_path: Path) -> RankRecord:
    """The record of rank 1: one step, and one gradient."""
    event = {"event": "step", "step": 3, "time": 0.5, "kind": "crafted"}
    (tmp_path / EVENTS).write_text(json.dumps(event) + "\n")
    save_file({"3/grad/p0": torch.ones(2)}, tmp_path / TENSORS)
    return read_rank(tmp_path, 1, {"exit": 0})


def test_parts_on_record_are_returned(record: RankRecord) -> None:
    assert record.one("step", kind="crafted")["step"] == 3
    assert record.tensors["3/grad/p0"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("read", "expected", "actual"),
    [
        (
            lambda record: record.tensors["3/grad/p1"],
            "3/grad/p1 on record",
            "rank 1 has recorded none",
        ),
        (
            lambda record: record.first("step")["loss"],
            "'loss' of the event 'step' on record",
            "it is missing in step 3",
        ),
        (
            lambda record: record.one("step", step=4),
            "an event 'step' on record, step 4",
            "rank 1 has recorded none",
        ),
    ],
)
def test_a_part_that_is_missing_is_named(
    record: RankRecord, read: object, expected: str, actual: str
) -> None:
    assert callable(read)
    with pytest.raises(IncompleteRecord) as raised:
        read(record)
    assert (raised.value.expected, raised.value.actual) == (expected, actual)


def test_optional_parts_are_none(record: RankRecord) -> None:
    assert record.tensors.get("3/grad/p1") is None
    assert record.first("step", step=4) is None
