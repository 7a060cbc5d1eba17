"""Statistics of norms, by the number of updates, on records written by hand."""

from dataclasses import replace

import torch

from conformance.judging.oracles.wrapper_parts import require_statistics_of_batch
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.wrapper_parts import (
    NORMS,
    PARTS,
    modes_of_parts,
    options_of_norms,
)

SCENARIO = replace(PARTS, session_seed=7)
# The first step without dropout.
STEP = 3
BEFORE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
BATCH = torch.tensor([3.0, 0.25, 0.5], dtype=torch.float64)


def statistics(weight_of: str, offset: float = 0.0) -> Run:
    """Return a run whose norms in training mode count the batch with a weight.

    Args:
        weight_of: the number of updates, ``root`` for one with the momentum of half an update, or
            ``none``.
        offset: is added to the statistics.
    """
    tensors = {}
    modes = modes_of_parts(SCENARIO, STEP)
    for (block, name), (momentum, _) in options_of_norms(SCENARIO).items():
        assert name in NORMS
        if not modes[block, name]:
            continue
        once = 1.0 if momentum is None else momentum
        weight = {
            "none": 0.0,
            "root": 1 - (1 - once) ** 0.5,
            "one": once,
            "two": 1 - (1 - once) ** 2,
        }[weight_of]
        place = f"{block}/{name}/running_mean"
        tensors[f"{STEP}/begins/{place}"] = BEFORE
        tensors[f"{STEP}/ends/{place}"] = BEFORE + weight * (BATCH - BEFORE) + offset
    assert tensors
    return Run(SCENARIO, 1, [RankRecord(0, [], tensors, exit=0)])


def failures(run: Run) -> int:
    """Return the number of norms whose statistics are wrong."""
    found = Found()
    runs = {"parts@1": run, "vanilla-parts@1": statistics("one")}
    require_statistics_of_batch(runs, found)
    return len(found.failures)


def test_statistics_take_in_the_batch_once_or_twice() -> None:
    assert [failures(statistics(weight)) for weight in ("root", "one", "two")] == [0, 0, 0]


def test_statistics_of_no_batch_or_of_another_one_are_wrong() -> None:
    assert failures(statistics("none"))
    assert failures(statistics("one", offset=1e-6))
    assert failures(Run(SCENARIO, 1, [RankRecord(0, [], {}, exit=0)]))
