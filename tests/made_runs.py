"""Runs made without ranks: a rule is a pure function of records, so its tests need no rank."""

import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import torch

from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Failure, Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.rules import book
from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import Scenario
from conformance.subjects.claims import Claims, parse_claims
from tests.failures_on_file import without_values

Result = Callable[[Run, int, int, int], torch.Tensor]


def made_run(result: Result = mean, scenario: Scenario = VALUES, world: int = 2) -> Run:
    """Return a complete run of a right hook.

    Its gradients are ``result(run, rank, step, index)``.
    """
    run = Run(scenario, world, [RankRecord(rank, exit=0) for rank in range(world)])
    names = [run.parameter_name(i) for i in range(len(scenario.params))]
    for record in run.ranks:
        record.events.append(event("registered", -1, count=1, logged="hook"))
        for step in range(len(scenario.steps)):
            record.events += [
                event("step", step),
                *call(step, names, sum(torch.Size(p.shape).numel() for p in scenario.params)),
            ]
            record.events.append(
                event("stepped", step, rng_changed=[], parameters_changed=[], threads=1)
            )
            for index, spec in enumerate(scenario.params):
                values = result(run, record.rank, step, index).to(getattr(torch, spec.dtype))
                record.tensors[f"{step}/grad/{names[index]}"] = values.reshape(spec.shape)
        record.events.append(event("end", len(scenario.steps), tensors=len(record.tensors)))
    return run


def call(step: int, names: list[str], numel: int) -> list[dict[str, Any]]:
    """Return the events of one hook call on one bucket that holds everything."""
    same = {"call": step, "index": 0}
    value = {
        **{
            "state": "value",
            "tensor": True,
            "type": "torch.Tensor",
            "dtype": "float32",
            "device": "cpu",
            "layout": "strided",
        },
        **{
            "shape": [numel],
            "bucket_shape": [numel],
            "bucket_layout": "strided",
            "bucket_device": "cpu",
        },
        **{"contiguous": True, "offset": 0, "memory": [4096, 4 * numel], "digest": "same"},
    }
    return [
        event(
            "call",
            step,
            **same,
            is_last=True,
            numel=numel,
            dtype="float32",
            parameters=names,
            gradient_views=[],
        ),
        event(
            "returned", step, **same, type="torch.Future", is_future=True, done=False, digest=None
        ),
        event("value", step, **same, **value),
        event("rest", step, **same, digest="same"),
    ]


def event(name: str, step: int, /, **fields: Any) -> dict[str, Any]:
    return {"event": name, "step": step, "time": float(step), **fields}


def broken_run(scenario: Scenario = VALUES, world: int = 2, **evidence: Any) -> Run:
    """Return a run whose rank 1 ended without a record."""
    run = made_run(scenario=scenario, world=world)
    run.ranks[1] = RankRecord(1, run.ranks[1].events[:3], {}, evidence.pop("exit", 1), evidence)
    run.ranks[0] = RankRecord(0, run.ranks[0].events[:4], {}, -9, {"killed": True})
    run.stopped = "peer"
    return run


def read_failures(failures: Iterable[Failure]) -> str:
    """Return failures as people read them; a line that is indented continues the one before it."""
    lines = []
    for failure in failures:
        lines += [f"Expected: {failure.expected}", f"Actual: {failure.actual}"]
        if failure.cause:
            lines.append(f"Likely cause: {failure.cause}")
    return "\n".join(
        textwrap.fill(line, 90, subsequent_indent="    ", break_long_words=False) for line in lines
    )


def refused(number: str, records: Run | dict[str, Run], claims: str = "") -> str:
    """Return the failures of one rule as people read them, each sort of failure once."""
    rule = book()[number]
    found = Found()
    parsed = parse_claims(claims, rule.kind) if claims else Claims(kind=rule.kind)
    rule.check(records, parsed, found)
    first = {without_values(failure.expected): failure for failure in reversed(found.failures)}
    return read_failures(reversed(first.values()))
