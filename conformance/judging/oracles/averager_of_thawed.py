"""Moving averages of parameters that are frozen or unfrozen between two averages.

The reference averages all parameters. An averager may leave out those that require no gradient.
Then the average of a parameter begins with its first average after it was unfrozen; that of a
parameter that was frozen stays as it is, or the parameter itself is evaluated.
"""

import torch

from conformance.judging.oracles.averager_records import fed_to, group_at, result
from conformance.records.run import Run
from conformance.scenarios.averager_training import CHANGING, FROZEN, UNFROZEN, option
from conformance.scenarios.averaging_schedule import HELD, QUIET
from conformance.subjects.claims import Claims
from conformance.subjects.kinds._averager_schedule import schedule_of
from conformance.subjects.target import parse_target


def other_averages(
    run: Run, claims: Claims, rank: int, step: int, index: int
) -> list[torch.Tensor]:
    """Return the right averages of a parameter after a step beside that of the reference, flat in
    float64.
    """
    change = _change(run, claims)
    if change is None or step < change or index not in (FROZEN, UNFROZEN):
        return []
    found = [result(run, rank, step, index)]
    if index == UNFROZEN:
        found += _begun_anew(run, claims, rank, step, change)
    else:
        assert run.reference is not None
        kept = run.reference.ranks[rank].tensors.get(f"{change - 1}/applied/p{index}")
        found += [] if kept is None else [kept.reshape(-1).double()]
    return found


def may_be_none(run: Run, claims: Claims, rank: int, step: int) -> bool:
    """Return whether an averager has refused an evaluation, as it may: it has no average yet of a
    parameter that was unfrozen.
    """
    change = _change(run, claims)
    if change is None or step < change or _dues(claims, change, step):
        return False
    return run.ranks[rank].first("not_applied", step=step) is not None


def _change(run: Run, claims: Claims) -> int | None:
    """Return the step at which parameters are frozen and unfrozen, or None if none are."""
    if run.scenario.variant != CHANGING.variant or not claims.reference.startswith("EMA"):
        return None
    change = option(run.scenario, "change")
    return int(change) if change else None


def _dues(claims: Claims, first: int, last: int) -> list[int]:
    """Return the steps with an average from one step to another, both included."""
    schedule = schedule_of(claims.options)
    assert schedule is not None
    return [step for step in range(first, last + 1) if schedule.is_due(step)]


def _begun_anew(run: Run, claims: Claims, rank: int, step: int, change: int) -> list[torch.Tensor]:
    """Return the average that begins with the first one after a change, if there is one yet."""
    decay = float(parse_target(f"hooks_ref:{claims.reference}", "--claims like").kwargs["decay"])
    average: torch.Tensor | None = None
    for due in _dues(claims, change, step):
        mean = _mean(run, rank, due)
        average = mean if average is None else decay * average + (1 - decay) * mean
    return [] if average is None else [average]


def _mean(run: Run, rank: int, due: int) -> torch.Tensor:
    """Return the mean of the unfrozen parameter over the ranks at a step."""
    kinds = run.scenario.steps
    # Between the steps that set parameters, these stay as they are.
    latest = max(step for step in range(due + 1) if kinds[step] not in (QUIET, HELD))
    group = group_at(run, rank, latest)
    return torch.stack([fed_to(run, other, latest, UNFROZEN) for other in group]).mean(0)
