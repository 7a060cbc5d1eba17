"""Damaged records: what a broken subject can leave behind, or a rank that was cut off.

A subject can give tensors other values, types and shapes, and keep the kit from recording a tensor,
an event, the value of a field or the end of a run. It does not write the record: a field with a
value of another type than its own and None is nothing that it can produce (RULES.md, "Untested
here").
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from conformance.records.files import RAISED
from conformance.records.rank_record import Event, RankRecord, Tensors
from conformance.records.run import Run

Draw = random.Random
Damage = Callable[[Draw, Run], str]
"""Changes a run, and returns a description."""


def damaged(draw: Draw, run: Run) -> tuple[Run, str]:
    """Return a damaged copy of a run, and a description of the damage."""
    copy = _copied(run)
    text = draw.choice(DAMAGES)(draw, copy)
    for rank in copy.ranks:
        for end in rank.all("end"):
            end["tensors"] = len(rank.tensors)
    return copy, f"{run.name}: {text}"


def _copied(run: Run) -> Run:
    """Return a copy whose events and tensors can be replaced; the values are shared."""
    ranks = [
        replace(
            rank,
            events=[Event(event) for event in rank.events],
            tensors=Tensors(rank.rank, rank.tensors),
            evidence=dict(rank.evidence),
        )
        for rank in run.ranks
    ]
    return replace(run, ranks=ranks)


def _one_or_all(draw: Draw, run: Run) -> tuple[RankRecord, list[RankRecord]]:
    """Return a rank, and the ranks that are damaged as it is: itself alone, or all."""
    rank = draw.choice(run.ranks)
    return rank, [rank] if draw.random() < 0.5 else run.ranks


# --- tensors --------------------------------------------------------------------------------------

# What a subject can put in place of a tensor: other values, dtypes and shapes.
_OTHER_TENSORS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda tensor: torch.full_like(tensor, float("nan")) if _is_real(tensor) else tensor + 1,
    lambda tensor: torch.full_like(tensor, float("inf")) if _is_real(tensor) else tensor - 1,
    lambda tensor: tensor.nan_to_num(0, 0, 0).clamp(-9, 9).to(torch.int64),
    lambda tensor: tensor.to(torch.float64),
    lambda tensor: tensor.to(torch.bfloat16),
    lambda tensor: tensor != 0,
    lambda tensor: tensor.reshape(-1),
    lambda tensor: tensor.reshape(-1)[:0],
    lambda tensor: tensor.new_zeros(()),
    lambda tensor: torch.cat([tensor.reshape(-1)] * 2),
    lambda tensor: tensor.reshape(1, *tensor.shape),
)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def _drawn_tensors(draw: Draw, rank: RankRecord) -> tuple[str, set[str]]:
    """Return the name of a tensor, and the names to damage: of one step, or of all."""
    name = draw.choice(sorted(rank.tensors))
    if draw.random() < 0.5:
        return name, {name}
    _, _, kept = name.partition("/")
    return f"{kept} of all steps", {other for other in rank.tensors if other.endswith(f"/{kept}")}


def _without_tensors(draw: Draw, run: Run) -> str:
    """Take tensors away."""
    rank, ranks = _one_or_all(draw, run)
    if not rank.tensors:
        return "nothing"
    text, names = _drawn_tensors(draw, rank)
    for one in ranks:
        for name in names:
            one.tensors.pop(name, None)
    return f"without tensor {text}, rank {[one.rank for one in ranks]}"


def _with_other_tensors(draw: Draw, run: Run) -> str:
    """Replace tensors by others."""
    rank, ranks = _one_or_all(draw, run)
    if not rank.tensors:
        return "nothing"
    text, names = _drawn_tensors(draw, rank)
    way = draw.randrange(len(_OTHER_TENSORS))
    for one in ranks:
        for name in names & one.tensors.keys():
            one.tensors[name] = _OTHER_TENSORS[way](one.tensors[name])
    return f"another tensor {text}, way {way}, rank {[one.rank for one in ranks]}"


# --- events ---------------------------------------------------------------------------------------


def _drawn_events(draw: Draw, rank: RankRecord) -> tuple[str, Callable[[dict[str, Any]], bool]]:
    """Return the name of an event, and whether an event is one of them: of one step, or of all."""
    # Without its end a record is not finished: ranks are cut off below.
    name = draw.choice(sorted({event["event"] for event in rank.events} - {"end", "error"}))
    step = draw.choice([event["step"] for event in rank.all(name)])
    if draw.random() < 0.5:
        return f"{name} of step {step}", lambda one: one["event"] == name and one["step"] == step
    return name, lambda one: one["event"] == name


def _without_events(draw: Draw, run: Run) -> str:
    """Take events away: the calls that they stand for were not made."""
    rank, ranks = _one_or_all(draw, run)
    text, is_one = _drawn_events(draw, rank)
    for one in ranks:
        one.events = [event for event in one.events if not is_one(event)]
    return f"without {text}, rank {[one.rank for one in ranks]}"


def _with_events_twice(draw: Draw, run: Run) -> str:
    """Repeat events: the calls that they stand for were made twice."""
    rank, ranks = _one_or_all(draw, run)
    text, is_one = _drawn_events(draw, rank)
    for one in ranks:
        one.events = [event for event in one.events for _ in range(1 + is_one(event))]
    return f"{text} twice, rank {[one.rank for one in ranks]}"


def _with_events_late(draw: Draw, run: Run) -> str:
    """Move events to the end: the calls that they stand for were made late."""
    rank, ranks = _one_or_all(draw, run)
    text, is_one = _drawn_events(draw, rank)
    for one in ranks:
        # Only the closing event comes later.
        one.events[:-1] = sorted(one.events[:-1], key=is_one)
    return f"{text} late, rank {[one.rank for one in ranks]}"


def _without_field(draw: Draw, run: Run) -> str:
    """Take a field of events away."""
    rank, ranks = _one_or_all(draw, run)
    text, is_one = _drawn_events(draw, rank)
    field = _drawn_field(draw, rank, is_one)
    if field is None:
        return "nothing"
    for one in ranks:
        for event in filter(is_one, one.events):
            event.pop(field, None)
    return f"{text} without {field}, rank {[one.rank for one in ranks]}"


def _drawn_field(
    draw: Draw, rank: RankRecord, is_one: Callable[[dict[str, Any]], bool]
) -> str | None:
    """Return the name of a field of some events, or None if they have no fields."""
    names = {name for event in rank.events if is_one(event) for name in event}
    fields = sorted(names - {"event", "step", "time"})
    return draw.choice(fields) if fields else None


def _without_value(draw: Draw, run: Run) -> str:
    """Set a field of events to None: the kit could not find out its value."""
    rank, ranks = _one_or_all(draw, run)
    text, is_one = _drawn_events(draw, rank)
    field = _drawn_field(draw, rank, is_one)
    if field is None:
        return "nothing"
    for one in ranks:
        for event in filter(is_one, one.events):
            if field in event:
                event[field] = None
    return f"None as {field} of {text}, rank {[one.rank for one in ranks]}"


# --- ranks ----------------------------------------------------------------------------------------


def _cut_off(draw: Draw, run: Run) -> str:
    """End a rank early, by a signal, with an error, or without any word."""
    rank = draw.choice(run.ranks)
    at = draw.randrange(len(rank.events) + 1)
    rank.events = rank.events[:at]
    rank.tensors = Tensors(rank.rank)
    rank.exit = draw.choice((-9, -6, 0, 1, RAISED, None))
    rank.evidence = {"killed": True} if rank.exit is None else {}
    run.stopped = draw.choice(("ended", "peer", "hang"))
    if rank.exit == RAISED:
        rank.events.append(_error(draw))
    return f"rank {rank.rank} cut off after {at} events, exit {rank.exit}, {run.stopped}"


def _error(draw: Draw) -> Event:
    """Return the record of an error, perhaps without a text."""
    return Event(
        event="error",
        step=draw.choice((-1, 0, 3)),
        time=0.0,
        where=draw.choice(("backward", "register", "make", "step", "kit")),
        torch=torch.__version__,
        type=draw.choice(("ValueError", "ContractBreach", "SystemExit")),
        message=draw.choice(("", "\n", "a reason\nin two lines")),
        traceback="",
    )


DAMAGES: tuple[Damage, ...] = (
    _without_tensors,
    _with_other_tensors,
    _without_events,
    _with_events_twice,
    _with_events_late,
    _without_field,
    _without_value,
    _cut_off,
)
